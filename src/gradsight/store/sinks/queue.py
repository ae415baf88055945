"""Hands numbers to the sinks off the training thread.

A sink that fails is switched off; training and the other sinks go on.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradsight.core.problems import Problems
from gradsight.core.worker import Worker
from gradsight.values.histograms import Histogram

_PERIOD = 0.1
_LONGEST = 20_000
"""Entries that may wait for a slow sink; further ones are dropped, and counted."""
_PATIENCE = 60.0
"""Seconds a sink gets to take what is left when the run ends."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Scalars of a step, or one histogram."""

    step: int
    scalars: Mapping[str, float]
    histogram: Histogram | None = None
    name: str = ""
    """The histogram's."""


class SinkQueue:
    """Numbers on their way to the sinks."""

    def __init__(self, sinks: list[Any], problems: Problems) -> None:
        self._sinks = sinks
        self._problems = problems
        self._queue: list[_Entry] = []
        self._lock = threading.RLock()  # a signal may close a watch while this is held
        self._worker = Worker("gradsight-sinks", self._drain, _PERIOD)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Numbers of one step."""
        self._put(_Entry(step, values))

    def histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """A histogram."""
        self._put(_Entry(step, {}, histogram, name))

    def close(self) -> None:
        """Hand over what is left and close the sinks."""
        if not self._worker.stop(_PATIENCE):
            self._problems.report(
                "sinks-slow",
                f"the sinks did not take everything within {_PATIENCE:.0f} s; the rest is lost",
            )
            return
        for sink in list(self._sinks):
            if hasattr(sink, "close"):
                self._try(sink, sink.close)

    def _put(self, entry: _Entry) -> None:
        # Training never waits for a sink, whatever network is behind it.
        with self._lock:
            if len(self._queue) < _LONGEST:
                self._queue.append(entry)
                return
        self._problems.report(
            "sinks-full", "the sinks are slower than training: some steps are not shown there"
        )

    def _drain(self) -> None:
        with self._lock:
            batch = self._queue
            self._queue = []
        for entry in batch:
            for sink in list(self._sinks):  # a copy: one that fails is removed on the way
                self._hand_over(sink, entry)

    def _hand_over(self, sink: Any, entry: _Entry) -> None:
        if entry.histogram is None:
            self._try(sink, log_scalars, sink, entry.scalars, entry.step)
        elif hasattr(sink, "log_histogram"):
            self._try(sink, sink.log_histogram, entry.name, entry.histogram, entry.step)

    def _try(self, sink: Any, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:
            self._sinks.remove(sink)
            name = type(sink).__name__
            self._problems.report(
                f"sink-{name}",
                f"the sink {name} failed and is switched off: {type(error).__name__}: {error}",
            )


def log_scalars(sink: Any, values: Mapping[str, float], step: int) -> None:
    """Many numbers at once where the sink can take them so, else one by one."""
    if hasattr(sink, "log_scalars"):
        sink.log_scalars(values, step)
    else:
        for name, value in values.items():
            sink.log_scalar(name, value, step)
