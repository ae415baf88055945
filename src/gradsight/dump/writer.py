"""The writer's thread: takes staged dumps one by one; training does not wait for the disk."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from gradsight.core.guard import Guard
from gradsight.dump.job import Job

_LOOK = 1.0
"""Seconds after which a waiting thread sees whether the writer still lives."""


class Writer:
    """Runs jobs in their order, in a thread of its own or, if not asynchronous, on the spot."""

    def __init__(self, work: Callable[[Job], None], asynchronous: bool) -> None:
        self._work = work
        self._asynchronous = asynchronous
        self._jobs: deque[Job | None] = deque()
        self._unfinished = 0
        self._change = threading.Condition()
        self._guard = Guard(None, "dump", "a dump was given up")
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Take a job; what bounds their number is the buffers they hold."""
        if not self._asynchronous:
            self._guard.attempt(self._work, job)
            return
        if self._thread is None:
            run = partial(self._guard.attempt, self._run)
            self._thread = threading.Thread(target=run, name="gradsight-dump", daemon=True)
            self._thread.start()
        self._put(job)

    def wait(self) -> None:
        """Return when every job so far is done."""
        while self.wait_for_one():
            pass

    def wait_for_one(self) -> bool:
        """Wait for one more job to be done, or a moment; False where there is none."""
        with self._change:
            before = self._unfinished
            if before and self._is_alive():
                self._change.wait(_LOOK)
            return before > 0 and self._is_alive()

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Finish every job and end the thread."""
        if self._thread is not None:
            self._put(None)
            self._thread.join()
            self._thread = None

    def _put(self, job: Job | None) -> None:
        with self._change:
            self._jobs.append(job)
            self._unfinished += 1
            self._change.notify_all()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._jobs:
                    self._change.wait()
                job = self._jobs.popleft()
            try:
                if job is None:
                    return
                self._guard.attempt(self._work, job)
            finally:
                with self._change:
                    self._unfinished -= 1
                    self._change.notify_all()
