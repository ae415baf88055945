"""A clock whose time a test sets: a worker that waits by it works when it is told to."""

import threading


class HandClock:
    """Lets a worker's period pass at `tick`, and at no other time."""

    def __init__(self) -> None:
        self._waiting = threading.Semaphore(0)
        self._ticks = threading.Semaphore(0)

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """For the worker: wait for a tick, or for the end."""
        self._waiting.release()
        while not self._ticks.acquire(timeout=0.01):
            if stop.is_set():
                return True
        return stop.is_set()

    def tick(self) -> None:
        """Let one period pass; returns when the worker has done its work and waits again."""
        self._waiting.acquire()
        self._ticks.release()
        self._waiting.acquire()
        self._waiting.release()
