"""SIGTERM: the process ends by it with all its steps recorded, unless the user decides otherwise."""

import ctypes
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from gradsight.session import termination
from session.signalled import (
    HANG,
    STEPS,
    Ending,
    at_random,
    ended,
    inside,
    names_inside,
    train,
)

INSIDE = 16
WITH_A_LOCK = [
    "store/tail_format.py:pack",
    "store/store.py:_append",
    "store/sinks/queue.py:SinkQueue._hand_over",
    "store/sinks/queue.py:SinkQueue._put",
    "dump/writer.py:Writer._put",
    "core/problems.py:Problems.take_changed",
]
"""Functions of the thread that trains which run under a lock that other threads want too."""


def test_inside_functions_of_ours() -> None:
    """Whatever lock is held at that moment, the record is finished and the process ends."""
    found = names_inside()
    choose = random.Random(4)
    chosen = choose.sample(sorted(found), INSIDE - len(WITH_A_LOCK))
    chosen += [name for name in WITH_A_LOCK if name in found]
    wrong = {}
    for name in chosen:
        call = choose.randint(1, found[name])
        wrong[f"{name}, call {call}"] = inside(name, call).wrong()
    assert {what: why for what, why in wrong.items() if why is not None} == {}


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.2])
def test_at_any_moment(delay: float) -> None:
    ending = at_random(delay)
    assert ending.wrong() is None
    assert ending.made > 0


def sent_after_a_step(child: Callable[..., None]) -> Ending:
    """The parent sends the signal when the child has made its first step."""

    def parent(pid: int, reading: int) -> None:
        assert select.select([reading], [], [], HANG)[0]
        os.kill(pid, signal.SIGTERM)

    return ended(child, parent)


def slowly(tell: Callable[[], None]) -> Callable[[], None]:
    """So that the signal comes while there are steps to make."""

    def told() -> None:
        tell()
        time.sleep(0.02)

    return told


def with_handler(before: bool) -> Callable[[Path, Callable[[], None]], None]:
    """A loop of somebody who finishes it when asked to end, and notes how often they were."""

    def child(run_dir: Path, tell: Callable[[], None]) -> None:
        asked: list[int] = []
        earlier: list[Any] = []

        def mine(number: int, frame: Any) -> None:
            asked.append(number)
            for handler in earlier:
                handler(number, frame)

        if before:
            signal.signal(signal.SIGTERM, mine)
        first = True

        def told() -> None:
            nonlocal first
            if first and not before:
                # Set after the watch, and calling whatever was there before, as is good manners.
                earlier.append(signal.signal(signal.SIGTERM, mine))
            first = False
            tell()
            time.sleep(0.02)

        train(run_dir, told)
        print("asked:", asked)

    return child


@pytest.mark.parametrize("before", [True, False], ids=["set before", "set after, calls ours"])
def test_a_handler_of_the_users_is_called_once_and_decides(before: bool) -> None:
    ending = sent_after_a_step(with_handler(before))
    assert ending.status == 0, ending.said
    assert f"asked: [{int(signal.SIGTERM)}]" in ending.said
    assert ending.recorded == list(range(STEPS))


def test_an_ignored_signal_stays_ignored() -> None:
    def child(run_dir: Path, tell: Callable[[], None]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        train(run_dir, slowly(tell))

    ending = sent_after_a_step(child)
    assert ending.status == 0, ending.said
    assert ending.recorded == list(range(STEPS))


def test_the_main_thread_is_in_a_call_that_does_not_return() -> None:
    """A collective whose other ranks are gone, for instance: no handler of Python's can run."""

    def child(run_dir: Path, tell: Callable[[], None]) -> None:
        steps = iter(range(3))

        def told() -> None:
            if next(steps) == 2:
                mutex = ctypes.create_string_buffer(64)
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
                tell()
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
            tell()

        train(run_dir, told)

    ending = sent_after_a_step(child)
    assert ending.wrong() is None
    assert len(ending.recorded) in (1, 2, 3)


def test_a_process_that_cannot_be_ended_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first process of a container, to which signals mean nothing by default."""
    monkeypatch.setattr(termination, "_end_by_default", lambda number: None)
    monkeypatch.setattr(termination, "_LIVES_ON", 0.01)
    ending = sent_after_a_step(lambda run_dir, tell: train(run_dir, slowly(tell)))
    assert ending.status == 0, ending.said
    assert ending.recorded == list(range(STEPS))


def open_one(folder: Path) -> Any:
    model = nn.Linear(2, 2)
    return gradsight.watch(model, torch.optim.SGD(model.parameters()), run_dir=folder)


def threads_beside(before: set[threading.Thread]) -> list[str]:
    """Threads of ours that have come since; another test's watch may end while this one runs."""
    now = set(threading.enumerate()) - before
    return sorted(thread.name for thread in now if thread.name.startswith("gradsight"))


def test_watches_share_one_handler_and_leave_nothing(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    first = open_one(tmp_path / "a")
    handler = signal.getsignal(signal.SIGTERM)
    second = open_one(tmp_path / "b")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert threads_beside(before).count("gradsight-sigterm") == 1
    first.close()
    assert signal.getsignal(signal.SIGTERM) is handler
    second.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    assert threads_beside(before) == []


def test_a_run_that_is_closed_in_another_thread(tmp_path: Path) -> None:
    """Only the main thread may put the handler back; the next run does."""
    before = set(threading.enumerate())
    watched = open_one(tmp_path / "a")
    closing = threading.Thread(target=watched.close)
    closing.start()
    closing.join()
    assert [problem.key for problem in gradsight.open_run(tmp_path / "a").problems()] == [
        "no-steps"
    ]
    open_one(tmp_path / "b").close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert threads_beside(before) == []


def test_somebody_elses_wakeup_is_kept(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    try:
        watched = open_one(tmp_path)
        assert signal.set_wakeup_fd(writing) == writing
        watched.close()
        assert signal.set_wakeup_fd(-1) == writing
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)
