"""The demo, in small: it finds the fault that it plants, and says so on one screen."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

import gradsight
from cli.small_demo import SMALL
from gradsight.cli import main
from gradsight.cli.demo import perform, show_demonstration


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run for all tests."""
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    assert perform(SMALL, run_dir) == 0
    return run_dir


def poisoned(run_dir: Path) -> int:
    (incident,) = gradsight.open_run(run_dir).incidents()
    assert incident.diagnosis is not None
    sample_id = incident.diagnosis.samples[0].sample_id
    assert isinstance(sample_id, int)
    return sample_id


def test_it_finds_the_sample_that_it_poisoned(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_demonstration(done, SMALL, poisoned(done)) == 0
    out = capsys.readouterr().out
    sample = poisoned(done)
    assert f"planted        step 32: sample {sample} counts 1000 times, not once" in out
    assert f"culprit        sample {sample} (row 3): 100.0% of the squared gradient norm" in out
    assert "✅ found: the step and the sample are right" in out
    assert "% saved, gradients bit for bit the same" in out
    assert "step32, step39: every gradient, whole, with checksums" in out
    assert "best domains" in out
    assert "worst domains" in out


@pytest.mark.parametrize("wrong", [{"poisoned_step": 31}, {}])
def test_it_fails_if_it_finds_another_step_or_sample(
    done: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, int]
) -> None:
    sample = poisoned(done) + (0 if wrong else 1)
    assert show_demonstration(done, replace(SMALL, **wrong), sample) == 2
    assert "❌ not found: this is a fault of Gradsight's" in capsys.readouterr().out


def test_its_screen_is_plain_and_fits(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_demonstration(done, SMALL, poisoned(done))
    lines = [line for line in capsys.readouterr().out.splitlines() if str(done) not in line]
    assert not any("\033" in line for line in lines)
    assert max(map(cell_len, lines)) <= 80
    assert len(lines) <= 28


def test_all_instruments_have_left_their_record(done: Path) -> None:
    run = gradsight.open_run(done)
    assert len(list(run.steps())) == SMALL.steps
    assert len(list(run.scores())) == SMALL.steps * SMALL.batch_size
    assert any(
        scalar.name == "checkpointing/reduction" and scalar.value > 0 for scalar in run.memory()
    )
    assert {finding.code for finding in run.findings()} >= {"GS201"}
    report = (done / "report.md").read_text()
    assert "## Samples: their influence on 'validation'" in report
    assert "GS201" in report


def test_the_other_commands_can_look_at_it(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its samples have their text, and what is exported fits the data."""
    keep = done / "keep.txt"
    assert main(["influence", str(done), "--export", str(keep)]) == 0
    out = capsys.readouterr().out
    assert "Worst samples" in out
    assert "No text of samples here" not in out
    from gradsight.train.samples import open_samples, read_weights

    samples = open_samples(gradsight.open_run(done).config["settings"])
    assert keep.read_text().splitlines()[0] == samples.stamp
    weights = read_weights(keep, samples)
    assert 0 < (weights == 0).sum() < SMALL.steps * SMALL.batch_size
    assert weights[poisoned(done)] in (0, 1)
    assert main(["dump", "verify", str(done)]) == 0
