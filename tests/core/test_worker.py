"""A worker works when its period has passed, and once more at the end."""

import threading

from core.hand_clock import HandClock
from gradsight.core.worker import Worker


def test_once_a_period_and_once_at_the_end() -> None:
    done: list[int] = []
    clock = HandClock()
    worker = Worker("test", lambda: done.append(len(done)), 0.25, clock)
    assert done == []
    clock.tick()
    assert done == [0]
    clock.tick()
    clock.tick()
    assert done == [0, 1, 2]
    assert worker.stop()
    assert done == [0, 1, 2, 3]


def test_by_the_wall_clock() -> None:
    worked = threading.Event()
    worker = Worker("test", worked.set, 0.001)
    assert worked.wait(60)
    assert worker.stop()


def test_one_that_does_not_end_in_time() -> None:
    begun = threading.Event()
    go_on = threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()

    worker = Worker("test", work, 0.0)
    assert begun.wait(60)
    assert not worker.stop(timeout=0.01)
    go_on.set()
    assert worker.stop()


def test_it_may_stop_itself() -> None:
    stopped = threading.Event()

    def work() -> None:
        worker.stop()
        stopped.set()

    ready = threading.Event()
    worker = Worker("test", lambda: ready.wait() and work(), 0.0)
    ready.set()
    assert stopped.wait(60)
