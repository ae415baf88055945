"""Capture sees the gradient as design has it, whatever the loop looks like, and changes nothing."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward as backward_imported_by_name

import gradsight
from session import loops
from session.loops import Case

TOLERANCE = {"autocast": 0.05}


@contextlib.contextmanager
def unwatched(model: nn.Module, optimizers: Any) -> Iterator[None]:
    yield None


def into(run_dir: Path) -> Callable[..., Any]:
    every = gradsight.Schedule(step_interval=3)
    return lambda model, optimizers: gradsight.watch(
        model, optimizers, run_dir=run_dir, histograms=every
    )


@pytest.mark.parametrize("loop", loops.TRUTHFUL, ids=lambda loop: loop.__name__)
def test_every_loop_is_seen_truly_and_left_alone(
    loop: Callable[[Case], None], tmp_path: Path
) -> None:
    case = Case(into(tmp_path))
    loop(case)
    run = gradsight.open_run(tmp_path)
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(loops.STEPS))
    assert {step.gradient for step in steps} == {"true"}
    assert [step.step for step in steps if step.skipped] == case.skipped
    compare(run, case, TOLERANCE.get(loop.__name__, 1e-5))

    alone = Case(unwatched)
    loop(alone)
    assert all(torch.equal(a, b) for a, b in zip(case.weights, alone.weights, strict=True)), (
        "training was changed"
    )


def compare(run: Any, case: Case, tolerance: float) -> None:
    """Norm and largest magnitude of every parameter at every step against the float64 twin."""
    recorded = {(stat.step, stat.parameter): stat for stat in run.parameter_stats()}
    wrong = []
    for step, expected in enumerate(case.expected):
        names = {name for at, name in recorded if at == step}
        assert names >= set(expected), f"step {step} lacks {set(expected) - names}"
        for name in names - set(expected):
            assert recorded[step, name].l2 == 0, f"step {step}: {name} has no gradient in the twin"
        if step in case.skipped:
            assert not math.isfinite(next(s.total_norm for s in run.steps() if s.step == step))
            continue
        rounding = 1e-6 * math.hypot(*(float(gradient.norm()) for gradient in expected.values()))
        for name, gradient in expected.items():
            stat = recorded[step, name]
            norm, peak = float(gradient.norm()), float(gradient.abs().max())
            if max(abs(stat.l2 - norm), abs(stat.max_abs - peak)) > tolerance * peak + rounding:
                wrong.append(
                    f"step {step} {name}: {stat.l2} against {norm}, {stat.max_abs} against {peak}"
                )
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("loop", loops.CHANGED, ids=lambda loop: loop.__name__)
def test_what_is_added_to_a_clipped_gradient_is_not_called_true(
    loop: Callable[[Case], None], tmp_path: Path
) -> None:
    case = Case(into(tmp_path))
    loop(case)
    run = gradsight.open_run(tmp_path)
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(loops.STEPS))
    assert {step.gradient for step in steps} == {"changed between backward passes"}
    compare(run, case, 1e-5)
    alone = Case(unwatched)
    loop(alone)
    assert all(torch.equal(a, b) for a, b in zip(case.weights, alone.weights, strict=True))


@pytest.mark.parametrize(
    ("loop", "clipped"),
    [
        (loops.plain, 1.0),
        (loops.clip_norm, None),
        (loops.clip_by_name, None),
        (loops.clip_in_two_parts, None),
        (loops.accumulation, None),
        (loops.scaler, 1.0),
        (loops.scaler_with_clipping, None),
        (loops.scaler_fused, 1.0),
        (loops.two_optimizers_together, None),
        (loops.another_model_between, None),
        (loops.two_losses, None),
        (loops.scaler_with_another_backward, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_clip_coefficient_is_found(
    loop: Callable[[Case], None], clipped: float | None, tmp_path: Path
) -> None:
    loop(Case(into(tmp_path)))
    for step in gradsight.open_run(tmp_path).steps():
        assert step.total_norm is not None
        expected = min(1.0, 0.05 / (step.total_norm + 1e-6)) if clipped is None else clipped
        assert step.clip_coef == pytest.approx(expected, rel=1e-4)


def test_clipping_by_value_is_no_coefficient(tmp_path: Path) -> None:
    loops.clip_value(Case(into(tmp_path)))
    assert all(step.clip_coef is None for step in gradsight.open_run(tmp_path).steps())


def test_scale_and_learning_rate_are_found(tmp_path: Path) -> None:
    loops.scaler_skipping(Case(into(tmp_path)))
    steps = list(gradsight.open_run(tmp_path).steps())
    assert steps[0].scale == 2.0**13
    assert steps[5].scale == 2.0**11  # two skipped steps halved it twice
    assert {step.lr for step in steps} == {1e-3}


def test_update_ratio_is_the_step_over_the_weight(tmp_path: Path) -> None:
    model = loops.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=tmp_path):
        before = [parameter.detach().double().clone() for parameter in model.parameters()]
        loops.mse(model, (torch.randn(4, 8), torch.randn(4, 4))).backward()
        optimizer.step()
    after = [parameter.detach().double() for parameter in model.parameters()]
    for stat, old, new in zip(
        gradsight.open_run(tmp_path).parameter_stats(), before, after, strict=True
    ):
        assert stat.update_ratio == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-5)
        assert stat.update_ratio_error == 0
        assert stat.weight_rms == pytest.approx(float(old.square().mean().sqrt()), rel=1e-6)
        assert stat.update_rms == pytest.approx(float((new - old).square().mean().sqrt()), rel=1e-5)


def late(case: Case) -> None:
    """Backward was imported before anybody could watch it, and clipping follows."""
    model = loops.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, optimizer):
        for batches in case.steps():
            backward_imported_by_name(loops.mse(model, batches[0]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    case.done(model)


def autograd_grad(case: Case) -> None:
    """No backward pass at all: gradients are put in place by hand."""
    model = loops.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, optimizer):
        for batches in case.steps():
            gradients = torch.autograd.grad(loops.mse(model, batches[0]), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    case.done(model)


@pytest.mark.parametrize("loop", [late, autograd_grad], ids=lambda loop: loop.__name__)
def test_what_cannot_be_seen_truly_says_so(loop: Callable[[Case], None], tmp_path: Path) -> None:
    case = Case(into(tmp_path))
    loop(case)
    steps = list(gradsight.open_run(tmp_path).steps())
    assert len(steps) == loops.STEPS
    assert {step.gradient for step in steps[1:]} == {"at the optimizer"}
    # The pre-flight looks at the operations of the first pass, and so at its backward too.
    if steps[0].gradient == "true":
        assert steps[0].total_norm > 0.051, "what is clipped to 0.05 is not the true gradient"
    else:
        assert steps[0].gradient == "at the optimizer"
    alone = Case(unwatched)
    loop(alone)
    assert all(torch.equal(a, b) for a, b in zip(case.weights, alone.weights, strict=True))
