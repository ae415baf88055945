"""Two processes train as one does: the same samples, losses, scores and weights, within float
tolerance.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import gradsight
import warm
from launch import run_ranks
from train.small import DUMP, log, options, run, weights, write_text

CASES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "ddp-regular-accumulated": {
        "parallel": "ddp",
        "method": "Regular",
        "gradient_accumulation_steps": 2,
    },
    "ddp-accumulated-checkpointed": {
        "parallel": "ddp",
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
    "fsdp-accumulated": {"parallel": "fsdp", "gradient_accumulation_steps": 2},
    "fsdp-regular-checkpointed": {
        "parallel": "fsdp",
        "method": "Regular",
        "gradient_checkpointing": True,
    },
    "ddp-autocast": {"parallel": "ddp", "train_dtype": "bfloat16"},
    "fsdp-autocast": {"parallel": "fsdp", "train_dtype": "bfloat16"},
}
COMMON = {"max_steps": 4, "val_batch_size": 2, "log_interval": 2}


FIRST_TIER = ("ddp", "fsdp")
TIERS = [pytest.param(name, marks=() if name in FIRST_TIER else pytest.mark.slow) for name in CASES]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("ranks") / "text").parent


@pytest.fixture(scope="module")
def first_tier(text: Path) -> Path:
    """The folder in which two ranks have trained the cases of the first tier, with dumps."""
    dump = {f"{DUMP}.enabled": True, f"{DUMP}.step_interval": 3}
    train_on_two_ranks([options_of(name, text, **dump) for name in FIRST_TIER])
    return text


@pytest.fixture(scope="module")
def slow_tier(text: Path) -> Path:
    """The folder in which two ranks have trained the other cases, two of them in two parts."""
    first, second, *others = (name for name in CASES if name not in FIRST_TIER)
    half = [options_of(name, text, max_steps=2) for name in (first, second)]
    rest = [[*options_of(name, text), "--resume"] for name in (first, second)]
    train_on_two_ranks([*half, *rest, *(options_of(name, text) for name in others)])
    return text


def options_of(name: str, folder: Path, **changes: Any) -> list[str]:
    place = {"data": folder / "text", "results_dir": folder / "Results", "experiment": name}
    settings = COMMON | CASES[name] | place | changes
    return options(**settings, batch_size=2, checkpoint_interval=2)


def train_on_two_ranks(runs: list[list[str]]) -> None:
    script = Path(__file__).with_name("ranks.py")
    run_ranks(script, json.dumps(runs), timeout=150, preload=warm.TRANSFORMERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIERS)
def test_two_ranks_are_as_one(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("first_tier" if name in FIRST_TIER else "slow_tier")
    case = {key: value for key, value in CASES[name].items() if key != "parallel"}
    one = gradsight.open_run(run(folder, experiment=f"one-{name}", batch_size=4, **COMMON, **case))
    two = gradsight.open_run(folder / "Results" / name)
    assert two.config["world_size"] == 2
    exact = "autocast" not in name
    for ours, theirs in zip(two.steps(), one.steps(), strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5 if exact else 0.01)
        assert ours.total_norm == pytest.approx(theirs.total_norm, rel=1e-4 if exact else 0.05)
    for ours, theirs in zip(log(two.path), log(one.path), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4 if exact else 0.01)
    assert_same_scores(one, two, exact)
    if exact:
        assert_same_weights(one.path, two.path)


def assert_same_scores(one: Any, two: Any, exact: bool) -> None:
    ours, theirs = (
        {(s.step, s.sample_id): s for s in recorded.scores()} for recorded in (two, one)
    )
    assert ours.keys() == theirs.keys()
    assert [ours[key].domain for key in ours] == [theirs[key].domain for key in ours]
    if exact and ours:
        largest = max(abs(score.score) for score in theirs.values())
        assert max(abs(ours[key].score - theirs[key].score) for key in ours) < 1e-4 * largest


def assert_same_weights(one: Path, two: Path) -> None:
    """Adam makes a large step of a tiny difference where a gradient is next to zero: compare as
    vectors.
    """
    expected, found = weights(one), weights(two)
    for name, value in expected.items():
        if name.startswith("model/"):
            assert float((found[name] - value).norm()) < 1e-3 * float(
                value.norm().clamp(min=0.1)
            ), name


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_dumps_of_two_ranks(name: str, first_tier: Path) -> None:
    dumps = first_tier / "Results" / name / "gradient_dumper"
    assert sorted(path.name for path in dumps.iterdir()) == ["step0", "step3"]
    stats = {
        (s.step, s.parameter): s.l2 for s in gradsight.open_run(dumps.parent).parameter_stats()
    }
    for step in (0, 3):
        place = dumps / f"step{step}" / "full_gradients"
        names = list(gradsight.get_checkpoint_metadata(place).tensors)
        for parameter, gradient in zip(names, gradsight.load_keys(place, names), strict=True):
            assert float(gradient.norm()) == pytest.approx(stats[step, parameter], rel=1e-4)
