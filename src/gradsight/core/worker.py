"""A thread that does something every now and then until it is told to stop. No torch."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gradsight.core.guard import Guard


class Clock(Protocol):
    """What a worker waits by; tests have one whose time they set themselves."""

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """Wait for so long, or until stopped; tell whether it was stopped."""


class WallClock:
    """Time as it passes."""

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """Wait for so long, or until stopped; tell whether it was stopped."""
        return stop.wait(seconds)


WALL_CLOCK = WallClock()


class Worker:
    """Calls `work` every `period` seconds, and once more when stopped.

    If `work` fails, that is said, and it is called no more but at the end.
    """

    def __init__(
        self, name: str, work: Callable[[], None], period: float, clock: Clock = WALL_CLOCK
    ) -> None:
        self._work = work
        self._period = period
        self._clock = clock
        self.end = threading.Event()
        """Set, the thread ends soon; `stop` also waits for it."""
        self._guard = Guard(None, name, f"the thread {name} stopped")
        # A daemon, so that a script that forgets to close can still end; the store's tail keeps
        # what the thread had not yet brought in.
        run = partial(self._guard.attempt, self._run)
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Let it finish what is left; tell whether it did so in time."""
        self.end.set()
        # A thread cannot wait for its own end.
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._clock.wait(self.end, self._period):
            self._guard.run(self._work)
        self._guard.attempt(self._work)
