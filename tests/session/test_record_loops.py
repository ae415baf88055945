"""Each number in the record is right, labelled as something else, or absent, in every loop of the
table.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import gradsight
import warm
from session.record_loops import LOOPS, NONE, Expected, Loop, Truth, unwatched

pytestmark = pytest.mark.filterwarnings("ignore::gradsight.errors.GradsightWarning")
by_name = pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)


def into(run_dir: Path, **options: Any) -> Callable[..., Any]:
    return lambda model, optimizers: gradsight.watch(
        model, optimizers, run_dir=run_dir, quiet=True, **options
    )


def same(recorded: float | None, expected: float | None, tolerance: float = 1e-5) -> bool:
    if recorded is None or expected is None:
        return recorded is expected
    if not math.isfinite(expected):
        return not math.isfinite(recorded)
    return math.isclose(recorded, expected, rel_tol=tolerance, abs_tol=1e-300)


def wrong_numbers(
    run: Any, loop: Loop, expected: Sequence[Expected], labels: Sequence[str], by_names: bool = True
) -> list[str]:
    """Every number of a record that differs from the truth, in words."""
    wrong = []
    stats: dict[int, dict[str, float]] = {}
    for stat in run.parameter_stats():
        stats.setdefault(stat.step, {})[stat.parameter] = stat.l2
    for step, truth, label in zip(run.steps(), expected, labels, strict=True):
        is_seen = label != NONE
        clip = truth.clip if loop.has_clip else None
        numbers: dict[str, tuple[object, object, bool]] = {
            "label": (step.gradient, label, step.gradient == label),
            "lr": (step.lr, truth.lr, same(step.lr, truth.lr)),
            "loss": (step.loss, truth.loss, not by_names or same(step.loss, truth.loss)),
        }
        total = truth.total if is_seen and truth.norms else None
        numbers["total_norm"] = (step.total_norm, total, same(step.total_norm, total))
        clip = clip if is_seen else None
        # Of a gradient with NaN a part may still show that nothing was clipped.
        if not by_names and step.step < loop.run_clip_missing:
            clip = None
        fits = same(step.clip_coef, clip, 1e-3) or not math.isfinite(truth.total)
        numbers["clip_coef"] = (step.clip_coef, clip, fits)
        recorded = stats.get(step.step, {})
        if not by_names:
            recorded = dict(enumerate(sorted(recorded.values())))  # type: ignore[arg-type]
        norms = truth.norms if is_seen else {}
        if not by_names:
            zeros = [0.0] * (len(recorded) - len(norms))
            norms = dict(enumerate(sorted([*norms.values(), *zeros])))  # type: ignore[arg-type]
        for name in norms.keys() | recorded.keys():
            there, there_not = recorded.get(name), norms.get(name)
            fits = same(there or 0.0, there_not or 0.0) or _is_rounding(there, there_not, truth)
            numbers[f"l2 of {name}"] = (there, there_not, fits)
        wrong += [
            f"step {step.step}, {step.gradient}: {name} {seen}, truth {right}"
            for name, (seen, right, fits) in numbers.items()
            if not fits
        ]
    return wrong


def _is_rounding(recorded: float | None, expected: float | None, truth: Expected) -> bool:
    return abs((recorded or 0.0) - (expected or 0.0)) <= 1e-6 * truth.total


@by_name
def test_record_has_what_the_optimizer_used(loop: Loop, tmp_path: Path) -> None:
    truth, alone = Truth(), Truth()
    loop.train(truth, into(tmp_path))
    loop.train(alone, unwatched)
    assert truth.has_same_weights(alone), "training was changed"
    run = gradsight.open_run(tmp_path)
    expected = truth.steps[: len(truth.steps) - loop.missing]
    recorded = list(run.steps())
    assert [step.step for step in recorded] == list(range(len(expected)))
    wrong = wrong_numbers(run, loop, expected, loop.labels(len(expected)))
    assert not wrong, "\n".join(wrong)
    assert tuple(problem.key for problem in run.problems()) == loop.problems


FIRST_TIER = {
    "plain",
    "accumulation_clipped",
    "clipped",
    "clipped_by_value",
    "clipped_first_layer_only",
    "divided_by_tokens",
    "divided_by_tokens_then_clipped",
    "static_loss_scale",
    "masked",
    "last_layer_set_to_none",
    "replaced_then_clipped",
    "private",
    "probed",
    "clamped_by_hooks",
    "clipped_inside_step",
    "subclass_calls_super",
    "head_swapped_in_its_group",
    "adapter_added",
    "lr_one_cycle",
    "odd_parameters",
    "scaler_default_scale",
    "scaler_unscaled_and_clipped",
    "scaler_divided_by_hand",
    "scaler_of_two_scaled_at_once",
    "second_optimizer_idle",
    "adversaries",
    "optimizer_made_again",
    "ascent_with_another_optimizer",
    "autograd_only",
    "functional",
    "cleared",
    "architecture_search",
    "lbfgs",
    "closure_accumulating",
    "step_without_backward",
}
"""One loop of each kind; the others run in the second tier."""


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, id=loop.name, marks=() if loop.name in FIRST_TIER else pytest.mark.slow)
        for loop in LOOPS
        if not loop.only_watch
    ],
)
def test_unmodified_script_has_the_same_record(loop: Loop, tmp_path: Path) -> None:
    """Recorded as `gradsight run` does it."""
    script = Path(__file__).with_name("record_loops.py")
    done = warm.run([script, tmp_path, loop.name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "truth.json").read_text())
    expected = [Expected(**step) for step in steps][: len(steps) - loop.run_missing]
    run = gradsight.open_run(tmp_path / "run")
    assert len(list(run.steps())) == len(expected), done.stderr
    labels = loop.labels(len(expected), under_run=True)
    wrong = wrong_numbers(run, loop, expected, labels, by_names=False)
    assert not wrong, "\n".join(wrong)


def test_every_loop_of_the_first_tier_is_there() -> None:
    assert {loop.name for loop in LOOPS if not loop.only_watch} >= FIRST_TIER
