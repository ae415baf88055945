"""The writer's thread: takes staged dumps one by one; training does not wait for the disk."""

import threading
from collections import deque
from collections.abc import Callable

from gradsight.core.locks import HeldBriefly
from gradsight.dump.job import Job


class Writer:
    """Runs jobs in their order, in a thread of its own or, if not asynchronous, on the spot."""

    def __init__(self, work: Callable[[Job], None], asynchronous: bool) -> None:
        self._work = work
        self._asynchronous = asynchronous
        self._jobs: deque[Job | None] = deque()
        self._unfinished = 0
        # Not a queue.Queue: a signal in the middle of its put() would find its lock taken.
        self._change = threading.Condition(HeldBriefly())
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Take a job; what bounds their number is the buffers they hold."""
        if not self._asynchronous:
            self._work(job)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradsight-dump", daemon=True)
            self._thread.start()
        self._put(job)

    def wait(self) -> None:
        """Return when every job so far is done."""
        if self._thread is not None:
            with self._change:
                while self._unfinished:
                    self._change.wait()

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
                self._work(job)
            finally:
                with self._change:
                    self._unfinished -= 1
                    self._change.notify_all()
