"""The guard: it keeps errors of Gradsight from training, and lets interrupts through."""

from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from gradsight.core.guard import Guard
from gradsight.core.problems import Problems

pytestmark = pytest.mark.internal


@pytest.mark.filterwarnings("ignore")
def test_a_fault_is_printed_when_it_cannot_be_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no report possible")

    problems = Problems()
    monkeypatch.setattr(problems, "report", broken)
    guard = Guard(problems, "test", "the test failed")
    assert guard.run(broken) is None
    assert guard.faults == 1
    printed = capsys.readouterr().err
    assert printed.startswith("gradsight: the test failed: OSError: no report possible (broken, ")
    assert guard.run(lambda: 1) is None  # after a fault, run does nothing
    assert guard.attempt(lambda: 1) == 1


def test_interrupts_and_usage_errors_pass_the_guard() -> None:
    """Let through interrupts, exits, usage errors and errors with `passes_guard`."""

    class Intended(Exception):
        passes_guard = True

    def failing(error: BaseException) -> Any:
        def fail() -> None:
            raise error

        return fail

    guard = Guard(None, "test", "the test failed", passing=gradsight.GradsightError)
    for error in (KeyboardInterrupt(), SystemExit(3), gradsight.GradsightError("mine"), Intended()):
        with pytest.raises(type(error)):
            guard.run(failing(error))
    assert guard.faults == 0


def test_close_runs_every_action_whatever_fails(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    tries: list[int] = []

    def fails() -> None:
        tries.append(1)
        raise RuntimeError("always")

    def interrupted() -> None:
        raise KeyboardInterrupt

    guard = Guard(None, "test", "the test failed")
    guard.at_end(done.append, "first")
    guard.at_end(fails)
    guard.at_end(interrupted)
    guard.at_end(done.append, "last")
    with pytest.raises(KeyboardInterrupt):
        guard.close()
    assert done == ["last", "first"]
    assert len(tries) == 2
    guard.close()
    assert len(done) == 2
    assert capsys.readouterr().err.count("always") == 2


def test_grad_mode_is_restored_after_an_interrupt() -> None:
    guard = Guard(None, "test", "the test failed")

    def switches() -> None:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.run(switches)
    assert torch.is_grad_enabled()


def test_warnings_as_errors_do_not_end_a_dump_by_hand(tmp_path: Any) -> None:
    """pytest turns warnings into errors already."""
    model = nn.Linear(2, 1)
    model(torch.ones(3, 2)).sum().backward()
    with gradsight.GradientDumper(tmp_path / "run", max_bytes=1) as dumper:
        dumper.dump(model, 0)
        dumper.wait()
        assert [problem.key for problem in dumper.problems] == ["size"]
