"""A fault in any function of ours: training goes on bit for bit, all is put back, the fault is told."""

import random
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from gradsight.core.guard import Guard
from session import planted_faults as faults
from session.planted_faults import LOOPS, WAYS, functions, name_of, plain, ways

ALWAYS = ("session/", "core/moments", "core/passes", "core/problems", "core/notices")
"""Parts whose functions are all planted in; of the others, one in so many."""
ONE_IN = 6
FEWEST = 600
"""Functions of ours that the loops run through at least, else the tracing sees nothing."""


@pytest.fixture(scope="module")
def chosen() -> dict[str, list[tuple[CodeType, int]]]:
    """By loop: functions and a call of each. Each function is planted in one of its loops."""
    faults.leave_out_threads_of_others()
    found = {name: functions(watched) for name, watched in LOOPS.items()}
    codes = {name_of(code): code for by_code in found.values() for code in by_code}
    assert len(codes) > FEWEST
    choose = random.Random(1)
    taken: dict[str, list[tuple[CodeType, int]]] = {name: [] for name in LOOPS}
    for name, code in sorted(codes.items()):
        if not name.startswith(ALWAYS) and choose.randrange(ONE_IN):
            continue
        loop = choose.choice([loop for loop in LOOPS if code in found[loop]])
        taken[loop].append((code, choose.randint(1, found[loop][code])))
    return taken


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("loop", LOOPS)
def test_no_fault_reaches_the_loop(loop: str, half: int, chosen: Any) -> None:
    expected = plain(LOOPS[loop])
    wrong = []
    for place, (code, number) in enumerate(chosen[loop][half::2]):
        possible = ways(code)
        way = possible[place % len(possible)]
        failure = WAYS[way](LOOPS[loop], expected, code, number)
        if failure is not None:
            wrong.append(f"{way}: {name_of(code)} call {number}: {failure}")
    assert wrong == []


def test_the_planting_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard's `except`, the first fault comes out of the loop."""
    monkeypatch.setattr(
        Guard, "attempt", lambda self, action, *args, **kwargs: action(*args, **kwargs)
    )
    watched = LOOPS["optimizer"]
    found = {name_of(code): code for code in functions(watched)}
    expected = plain(watched)
    code = found["session/step_builder.py:StepBuilder.gradients_ready"]
    failure = WAYS["once"](watched, expected, code, 3)
    assert failure == f"raised Planted: {faults.WORDS}"


# What must be told survives the telling.


@pytest.mark.filterwarnings("ignore")
def test_a_fault_is_told_though_nothing_can_be_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradsight.core.problems import Problems

    def broken(*_: object) -> None:
        raise OSError("nothing can be told")

    problems = Problems()
    monkeypatch.setattr(problems, "report", broken)
    guard = Guard(problems, "test", "the test failed")
    assert guard.run(broken) is None
    assert guard.faults == 1
    said = capsys.readouterr().err
    assert said.startswith("gradsight: the test failed: OSError: nothing can be told (broken, ")
    assert guard.run(lambda: 1) is None  # it is out
    assert guard.attempt(lambda: 1) == 1


def test_what_passes_the_guard() -> None:
    """Interrupts, exits, wrong usage where the user asked, and what says so itself."""

    class Asked(Exception):
        passes_guard = True

    def failing(error: BaseException) -> Any:
        def fail() -> None:
            raise error

        return fail

    guard = Guard(None, "test", "the test failed", passing=gradsight.GradsightError)
    for error in (KeyboardInterrupt(), SystemExit(3), gradsight.GradsightError("mine"), Asked()):
        with pytest.raises(type(error)):
            guard.run(failing(error))
    assert guard.faults == 0


def test_all_is_done_at_the_end_whatever_fails(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_gradients_are_switched_on_again() -> None:
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
