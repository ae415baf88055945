"""SIGINT and SIGTERM as a wish: the step is finished first."""

import signal
import threading
import time
from types import FrameType
from typing import Any

_IMPATIENCE = 2.0
"""Seconds after which a second signal is meant: launchers pass the first one on, so it may come
twice.
"""


class Stopping:
    """Notes that somebody wants the run to end. Asked again, it ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        if (
            threading.current_thread() is threading.main_thread()
        ):  # elsewhere signals cannot be had, and do not come
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _IMPATIENCE:
            raise KeyboardInterrupt
