"""Two processes train as one does: the same samples, losses, scores and weights, within float
tolerance.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import gradsight
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks have trained every case: the first half by themselves, the rest resumed."""
    folder = tmp_path_factory.mktemp("ranks")
    write_text(folder / "text")
    runs = []
    for name, case in CASES.items():
        place = {
            "data": folder / "text",
            "results_dir": folder / "Results",
            "experiment": name,
            "batch_size": 2,
        }
        dump = (
            {f"{DUMP}.enabled": True, f"{DUMP}.step_interval": 3} if name in ("ddp", "fsdp") else {}
        )
        runs.append(options(**COMMON, **place, **case, **dump, checkpoint_interval=2))
    half = [
        [*tokens, "--max_steps=2"]
        for tokens in ([t for t in run if not t.startswith("--max_steps")] for run in runs[2:4])
    ]
    rest = [[*tokens, "--resume"] for tokens in runs[2:4]]
    run_ranks(
        Path(__file__).with_name("ranks.py"),
        json.dumps([*runs[:2], *half, *rest, *runs[4:]]),
        timeout=150,
    )
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_as_one(name: str, folder: Path) -> None:
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
def test_dumps_of_two_ranks(name: str, folder: Path) -> None:
    dumps = folder / "Results" / name / "gradient_dumper"
    assert sorted(path.name for path in dumps.iterdir()) == ["step0", "step3"]
    stats = {
        (s.step, s.parameter): s.l2 for s in gradsight.open_run(dumps.parent).parameter_stats()
    }
    for step in (0, 3):
        place = dumps / f"step{step}" / "full_gradients"
        names = list(gradsight.get_checkpoint_metadata(place).tensors)
        for parameter, gradient in zip(names, gradsight.load_keys(place, names), strict=True):
            assert float(gradient.norm()) == pytest.approx(stats[step, parameter], rel=1e-4)
