"""The writer's thread: takes staged dumps one by one; training does not wait for the disk."""

import queue
import threading
from collections.abc import Callable

from gradsight.dump.job import Job


class Writer:
    """Runs jobs in their order, in a thread of its own or, if not asynchronous, on the spot."""

    def __init__(self, work: Callable[[Job], None], asynchronous: bool) -> None:
        self._work = work
        self._asynchronous = asynchronous
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Take a job; what bounds their number is the buffers they hold."""
        if not self._asynchronous:
            self._work(job)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradsight-dump", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when every job so far is done."""
        if self._thread is not None:
            self._jobs.join()

    def close(self) -> None:
        """Finish every job and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                self._work(job)
            finally:
                self._jobs.task_done()
