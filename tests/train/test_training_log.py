"""training_log.json: every logged step and every evaluation, at a cost that does not grow."""

import json
import math
from pathlib import Path

import pytest

from gradsight.store.run_problems import RunProblems
from gradsight.train.training_log import TrainingLog
from train.small import log, run


def opened(folder: Path, up_to: int = 10**9) -> TrainingLog:
    return TrainingLog(folder, up_to, RunProblems(None))


def kept(folder: Path) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = json.loads((folder / "training_log.json").read_text())
    return entries


def test_a_step_is_one_object(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.add({"step": 0, "val_loss": 3.0})
    file.add({"step": 2, "loss": 2.5, "lr": 0.1, "grad_norm": math.nan})
    file.add({"step": 2, "val_loss": math.inf})
    assert kept(tmp_path) == [
        {"step": 0, "val_loss": 3.0},
        {"step": 2, "loss": 2.5, "lr": 0.1, "grad_norm": None, "val_loss": None},
    ]


def test_a_resumed_log_forgets_the_steps_that_are_made_again(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for step in range(5):
        file.add({"step": step, "loss": 1.0})
    resumed = opened(tmp_path, up_to=2)
    resumed.add({"step": 3, "loss": 2.0})
    assert [(entry["step"], entry["loss"]) for entry in kept(tmp_path)] == [
        (0, 1.0),
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_a_long_log_is_rewritten_ever_more_rarely(tmp_path: Path) -> None:
    (tmp_path / "training_log.json").write_text(json.dumps([{"step": n} for n in range(5000)]))
    file = opened(tmp_path)
    written = set()
    for step in range(5000, 5200):
        file.add({"step": step, "loss": 1.0})
        written.add((tmp_path / "training_log.json").stat().st_mtime_ns)
    assert 4 <= len(written) <= 6
    file.write()
    assert len(kept(tmp_path)) == 5200


@pytest.mark.parametrize("method", ["Regular", "GradDotProd"])
def test_what_a_run_leaves(method: str, tmp_path: Path) -> None:
    entries = log(run(tmp_path, method=method, log_interval=1, max_steps=4, eval_interval=2))
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3, 4]
    logged = {"step", "loss", "lr", "grad_norm"}
    evaluated = {"step", "epoch", "train_loss", "val_loss", "test_loss"}
    assert [set(entry) for entry in entries] == [
        evaluated,
        logged,
        logged | evaluated,
        logged,
        logged | evaluated,
    ]
    assert [entry["lr"] for entry in entries[1:3]] == [0.005, 0.01]
    assert all(entry["grad_norm"] > 0 for entry in entries[1:])
