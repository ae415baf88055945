"""Faults reach the run's record, whoever has it open and whoever has not."""

import subprocess
import warnings
from pathlib import Path

import pytest

import warm
from gradsight import MetricsTracker, open_run
from gradsight.core.problems import Problems
from gradsight.errors import GradsightWarning
from gradsight.store.run_problems import RunProblems
from gradsight.store.store import open_store
from gradsight.values.findings import Problem


def test_said_once_and_counted() -> None:
    problems = Problems()
    with pytest.warns(GradsightWarning) as seen:
        problems.report("disk", "the disk is full at step 3", 3)
        problems.report("disk", "the disk is full at step 4", 4)
    assert [str(warning.message) for warning in seen] == ["the disk is full at step 3"]
    assert problems.take_changed() == [Problem("disk", "the disk is full at step 3", 3, 2)]
    assert problems.take_changed() == []
    assert not problems.count("disk", "again")
    assert [problem.count for problem in problems.take_changed()] == [3]


def test_a_warning_never_becomes_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Problems().report("disk", "the disk is full")
    assert capsys.readouterr().err == "gradsight: the disk is full\n"


def test_the_store_asks_for_problems(tmp_path: Path) -> None:
    """Nobody hands them over: what is reported is in the record at the next flush."""
    store = open_store(tmp_path)
    assert store.problems.count("capture", "a fault", 2)
    store.flush()
    assert list(open_run(tmp_path).problems()) == [Problem("capture", "a fault", 2, 1)]
    store.problems.count("capture", "a fault", 3)
    store.close()
    assert list(open_run(tmp_path).problems()) == [Problem("capture", "a fault", 2, 2)]


@pytest.mark.filterwarnings("ignore::gradsight.errors.GradsightWarning")
def test_without_a_watch_the_record_is_opened_for_it(tmp_path: Path) -> None:
    problems = RunProblems(tmp_path)
    problems.report("scores", "scores are lost", 5)
    problems.report("scores", "scores are lost", 6)
    assert list(open_run(tmp_path).problems()) == [Problem("scores", "scores are lost", 5, 2)]
    open_store(tmp_path).close()  # and it was closed again


@pytest.mark.filterwarnings("ignore::gradsight.errors.GradsightWarning")
def test_an_open_record_is_shared(tmp_path: Path) -> None:
    with MetricsTracker(tmp_path) as tracker:
        RunProblems(tmp_path).report("scores", "scores are lost", 5)
        tracker.log_scalar("loss", 1.0, step=0)
    run = open_run(tmp_path)
    assert [problem.key for problem in run.problems()] == ["scores"]
    assert [scalar.name for scalar in run.scalars()] == ["loss"]


@pytest.mark.filterwarnings("ignore::gradsight.errors.GradsightWarning")
def test_a_record_that_another_process_has_open(tmp_path: Path) -> None:
    """Training goes on, and what could not be written comes with the next fault."""
    code = "import sys; from gradsight.store.store import open_store; "
    code += "open_store(sys.argv[1]); print('open', flush=True); input()"
    other = warm.Popen(["-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"open\n"
    problems = RunProblems(tmp_path)
    problems.report("first", "a fault", 1)
    other.communicate(b"\n")
    assert list(open_run(tmp_path).problems()) == []
    problems.report("second", "another fault", 2)
    assert [problem.key for problem in open_run(tmp_path).problems()] == ["first", "second"]


def test_without_a_run_dir_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(GradsightWarning, match="scores are lost"):
        RunProblems(None).report("scores", "scores are lost", 5)
    assert list(tmp_path.iterdir()) == []
