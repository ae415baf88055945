"""A resumed run goes on bit for bit as if it had never stopped."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import gradsight
from gradsight.cli import main
from gradsight.errors import GradsightWarning
from gradsight.train import checkpoint, training_log
from gradsight.train.batches import Batch
from gradsight.train.config import from_dict
from gradsight.train.run import run_training
from train.small import DUMP, TINY, differing, log, run, weights

KINDS: list[dict[str, Any]] = [
    {"model__dropout": 0.1},
    {"method": "Regular", "model_dtype": "bfloat16", "model__dropout": 0.1},
    {
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
        "train_dtype": "bfloat16",
        "model__dropout": 0.1,
    },
]
EIGHT = {"max_steps": 8, "checkpoint_interval": 3, "eval_interval": 4, "dot_prod_save_interval": 2}


class Crash(Exception):
    """What ends a run in the middle of a step."""


def crash_at(place: Path, step: int) -> None:
    """Begin the run anew, and let it crash in a step."""
    settings = replace(
        from_dict(gradsight.open_run(place).config["settings"]["train"], "here"), experiment="b"
    )

    def crash(now: int, batch: Batch) -> Batch:
        if now == step:
            raise Crash
        return batch

    with pytest.raises(Crash):
        run_training(settings, on_batch=crash)


def record(place: Path) -> tuple[Any, ...]:
    """Everything that a run has recorded, without times."""
    recorded = gradsight.open_run(place)
    steps = [
        (step.step, step.loss, step.lr, step.total_norm, step.clip_coef)
        for step in recorded.steps()
    ]
    scores = sorted(
        (score.step, score.sample_id, score.score, score.lr) for score in recorded.scores()
    )
    return steps, scores, list(recorded.parameter_stats()), log(place)


def resume(folder: Path, *more: str) -> Path:
    assert (
        main(
            [
                "train",
                "--resume",
                "--results_dir",
                str(folder / "Results"),
                "--experiment",
                "b",
                *more,
            ]
        )
        == 0
    )
    return folder / "Results" / "b"


@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_resumed_after_a_crash(kind: dict[str, Any], tmp_path: Path) -> None:
    whole = run(tmp_path, **EIGHT, **kind)
    crash_at(whole, 5)
    again = resume(tmp_path)
    assert differing(weights(whole), weights(again)) == []
    assert record(whole) == record(again)


@pytest.mark.slow
def test_resumed_from_every_checkpoint(tmp_path: Path) -> None:
    whole = run(tmp_path, **EIGHT | {"checkpoint_interval": 1, "keep_checkpoints": 99})
    for step in (1, 4, 7):
        shutil.rmtree(tmp_path / "Results" / "b", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "Results" / "b")
        for later in (tmp_path / "Results" / "b" / "checkpoints").iterdir():
            if int(later.name.removeprefix("step_")) > step:
                shutil.rmtree(later)
        again = resume(tmp_path)
        assert differing(weights(whole), weights(again)) == []
        assert record(whole) == record(again)


def test_what_was_beyond_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    whole = run(tmp_path, **EIGHT)
    crash_at(whole, 7)
    again = resume(tmp_path, "--max_steps", "7")
    assert [step.step for step in gradsight.open_run(again).steps()] == list(range(7))
    assert {score.step for score in gradsight.open_run(again).scores()} == set(range(7))


def test_a_run_can_be_made_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, experiment="b")
    again = resume(tmp_path, "--max_steps", "6")
    assert "Resuming after step 4" in capsys.readouterr().out
    assert [step.step for step in gradsight.open_run(again).steps()] == list(range(6))
    assert [entry["step"] for entry in log(again)] == [0, 2, 4, 6]


def test_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = run(tmp_path, experiment="b")
    before = weights(place)
    resume(tmp_path)
    assert "Nothing to do: 4 of 4 steps are made" in capsys.readouterr().out
    assert differing(before, weights(place)) == []


def test_old_checkpoints_go(tmp_path: Path) -> None:
    place = run(tmp_path, **EIGHT, keep_checkpoints=2)
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == [
        "step_000006",
        "step_000008",
    ]


def test_other_data_and_other_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run(tmp_path, experiment="b")
    common = [
        "train",
        "--resume",
        "--results_dir",
        str(place.parent),
        "--experiment",
        "b",
        "--max_steps",
        "6",
    ]
    assert main([*common, "--model.n_embd", "8"]) == 64
    assert "is of another model: transformer.wte.weight is (256, 8)" in capsys.readouterr().err
    file = tmp_path / "text" / "birds" / "0.txt"
    file.write_text(file.read_text().upper())
    assert main(common) == 64
    assert "was trained on other data" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run(tmp_path, experiment="b")
    folder = checkpoint.newest(place)
    assert folder is not None
    (folder / "tensors.safetensors").write_bytes(b"garbage")
    assert (
        main(
            [
                "train",
                "--resume",
                "--results_dir",
                str(place.parent),
                "--experiment",
                "b",
                "--max_steps",
                "6",
            ]
        )
        == 2
    )
    assert "cannot be read" in capsys.readouterr().err


def test_an_unfinished_checkpoint_does_not_count(tmp_path: Path) -> None:
    place = run(tmp_path, experiment="b")
    (place / "checkpoints" / "partial_step_000099").mkdir()
    (place / "checkpoints" / "step_000098").mkdir()
    folder = checkpoint.newest(place)
    assert folder is not None
    assert json.loads((folder / "checkpoint.json").read_text())["step"] == TINY["max_steps"]


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_TENSORS", "no/such/folder")
    with pytest.warns(GradsightWarning, match=r"the checkpoint .*step_00000[24] cannot be written"):
        place = run(tmp_path, checkpoint_interval=2)
    assert len(list(gradsight.open_run(place).steps())) == 4
    assert checkpoint.newest(place) is None
    (problem,) = gradsight.open_run(place).problems()
    assert (problem.key, problem.first_step, problem.count) == ("checkpoint", 2, 2)
    assert "step_000002 cannot be written" in (place / "report.md").read_text()


def test_scores_that_cannot_be_written_are_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.warns(GradsightWarning, match=r"no space left on device: scores are lost"):
        place = run(tmp_path)
    problems = {problem.key: problem for problem in gradsight.open_run(place).problems()}
    assert "no space left" in problems["score-files"].message
    assert "no space left" in (place / "report.md").read_text()


@pytest.mark.slow
def test_dumps_are_made_again(tmp_path: Path) -> None:
    whole = run(tmp_path, **EIGHT, **{f"{DUMP}.enabled": True, f"{DUMP}.save_first_n": 2})
    crash_at(whole, 5)
    again = resume(tmp_path)
    name = "sampled_gradients/transformer.ln_f.weight_first2.safetensors"
    for step in range(8):
        files = [place / "gradient_dumper" / f"step{step}" / name for place in (whole, again)]
        assert torch.equal(*(load_file(file)["gradient"] for file in files))


def full_disk(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_training_log_that_cannot_be_read_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = run(tmp_path, experiment="b", method="Regular")
    (place / "training_log.json").write_text("[{")
    common = [
        "train",
        "--resume",
        "--results_dir",
        str(place.parent),
        "--experiment",
        "b",
        "--max_steps",
        "6",
    ]
    assert main(common) == 2
    assert "training_log.json cannot be read" in capsys.readouterr().err
    (place / "training_log.json").unlink()
    monkeypatch.setattr(training_log, "write_text", full_disk)
    with pytest.warns(GradsightWarning, match=r"training_log.json cannot be written: No space"):
        assert main(common) == 0
    assert len(list(gradsight.open_run(place).steps())) == 6
    problems = {problem.key: problem for problem in gradsight.open_run(place).problems()}
    assert "training_log.json cannot be written" in problems["training-log"].message
    assert "training_log.json cannot be written" in (place / "report.md").read_text()
