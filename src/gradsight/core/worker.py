"""A thread that does something every now and then until it is told to stop."""

import threading
from collections.abc import Callable


class Worker:
    """Calls `work` every `period` seconds, and once more when stopped. `work` handles its own
    errors.
    """

    def __init__(self, name: str, work: Callable[[], None], period: float) -> None:
        self._work = work
        self._period = period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Let it finish what is left; tell whether it did so in time."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            self._work()
        self._work()
