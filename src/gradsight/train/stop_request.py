"""SIGINT and SIGTERM as a wish: the step is finished first."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_IMPATIENCE = 2.0
"""Seconds after which a second signal is meant: launchers pass the first on, so it comes twice."""


class StopRequest:
    """Notes that somebody wants the run to end. Asked again, it ends at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: int | None = None
        """The signal that asks for the end."""
        self._clock = clock
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        # In other threads signals cannot be had, and do not come.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            self._since = self._clock()
        elif self._clock() - self._since > _IMPATIENCE:
            raise KeyboardInterrupt
