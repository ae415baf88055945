"""Runs as long as a number of epochs, and looks at gradients that are counted in epochs."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gradsight
from gradsight.cli import main
from gradsight.errors import UsageError
from gradsight.train.config import Settings, from_dict
from gradsight.train.epochs import epochs_to_log, last_epoch, with_steps
from store.wandb_file import runs
from train.small import TINY, write_text

NORM = "gradients/transformer.h.0.attn/norm"
QUICK = {
    "method": "Regular",
    "eval_interval": 1000,
    "eval_samples": 1,
    "model.n_layer": 1,
    "checkpoint_interval": 0,
}


def looked_at(epochs: int, length: int, per_step: int, every: int) -> list[int]:
    """The epochs logged over a whole run, in their order."""
    steps = with_steps(Settings(epochs=epochs), length, per_step).max_steps
    logged: list[int] = []
    for step in range(steps):
        start, end = step * per_step, (step + 1) * per_step
        here = epochs_to_log(start, end, length, every)
        if step == steps - 1:
            here = sorted({*here, last_epoch(start, end, length)})
        logged += here
    return logged


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9, 12, 100, 101])
@pytest.mark.parametrize("per_step", [1, 2, 3, 4])
def test_ten_epochs_are_looked_at_three_times(length: int, per_step: int) -> None:
    assert looked_at(10, length, per_step, every=5) == [0, 5, 10]
    assert looked_at(10, length, per_step, every=3) == [0, 3, 6, 9, 10]
    assert looked_at(10, length, per_step, every=1) == list(range(11))
    assert looked_at(3, length, per_step, every=5) == [0, 3]


def test_a_step_of_several_epochs_misses_none() -> None:
    assert looked_at(10, length=3, per_step=8, every=5) == [0, 5, 10]


def small_run(folder: Path, samples: int, *flags: str) -> Path:
    """Train on so many samples; how long, the flags say."""
    (folder / "keep.txt").write_text("\n".join(map(str, range(samples))))
    options = TINY | QUICK | {"data": write_text(folder / "text"), "experiment": "a"}
    options |= {"data_weights": folder / "keep.txt", "results_dir": folder / "Results"}
    del options["max_steps"]
    given = [f"--{name}={str(value).lower()}" for name, value in options.items() if value is False]
    given += [f"--{name}={value}" for name, value in options.items() if value is not False]
    assert main(["train", *given, *flags]) == 0
    return folder / "Results" / "a"


@pytest.mark.slow
def test_the_look_reaches_wandb_and_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sinks = ["--trainer.callbacks.watch.sinks", "wandb", "--trainer.callbacks.watch.sinks"]
    place = small_run(tmp_path, 9, "--epochs", "10", *sinks, "tensorboard")
    assert "23 steps of 4 samples (10.22 epochs)" in capsys.readouterr().out
    recorded = gradsight.open_run(place)
    assert recorded.config["settings"]["train"]["max_steps"] == 23
    tracked = {scalar.step: scalar.value for scalar in recorded.scalars(NORM)}
    assert list(tracked) == [0, 5, 10]
    by_name = {each.name: each.by_step() for each in runs(place)}
    assert sorted(by_name) == ["a", "a-tracker"]
    assert list(by_name["a"])[:23] == list(range(23))
    epochs = by_name["a-tracker"]
    assert {epoch: row[NORM] for epoch, row in epochs.items()} == pytest.approx(tracked)
    assert all("gradients/histogram" in row for row in epochs.values())
    apart = place / "tensorboard" / "tracker"
    events = EventAccumulator(str(apart), size_guidance={"histograms": 0})
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars(NORM)}
    assert shown == pytest.approx(tracked)
    assert [event.step for event in events.Histograms("gradients/histogram")] == [0, 5, 10]


def test_a_run_goes_on_for_more_epochs_or_steps(tmp_path: Path) -> None:
    place = small_run(tmp_path, 8, "--epochs", "2")
    resume = ["train", "--resume", "--results_dir", str(place.parent), "--experiment", "a"]
    assert len(list(gradsight.open_run(place).steps())) == 4
    assert main([*resume, "--epochs", "3"]) == 0
    assert len(list(gradsight.open_run(place).steps())) == 6
    assert main([*resume, "--max_steps", "7"]) == 0
    assert len(list(gradsight.open_run(place).steps())) == 7


def test_epochs_and_steps_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--epochs", "2", "--max_steps", "1000"]) == 64
    message = "--max_steps and --epochs both say when the run ends: give one of them"
    assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UsageError, match="--epochs 2 and --max_steps 7 both say when the run ends"):
        from_dict({"epochs": 2, "max_steps": 7}, "here")
    with pytest.raises(UsageError, match="--epochs must be 1 or more, got 0"):
        Settings(epochs=0)
