"""Hands steps to the sinks off the training thread, each of them once and whole."""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from gradsight.core.problems import Problems
from gradsight.core.worker import Worker
from gradsight.store.sinks.step_sink import Alert, StepRow
from gradsight.store.sinks.switching_off import GuardedSinks
from gradsight.values.histograms import Histogram

_PERIOD = 0.1
_MOST_VALUES = 1_000_000
"""Numbers that may wait for a slow sink; steps beyond are dropped, and counted."""
_HISTOGRAM_VALUES = 100
"""What a histogram counts for."""
_AHEAD = 8
"""Steps whose numbers may come before they are written: a few are on their way to us."""
_PATIENCE = 60.0
"""Seconds the sinks get to take what is left and to close when the run ends."""


class SinkQueue:
    """Steps on their way to the sinks."""

    def __init__(self, sinks: list[Any], problems: Problems, first_step: int = 0) -> None:
        self._sinks = GuardedSinks(sinks, problems)
        self._problems = problems
        self._started = False
        self._open: dict[int, StepRow] = {}
        """Steps that more may be logged for: the last one written, and those to come."""
        self._written = first_step
        self._rows: deque[StepRow] = deque()
        self._alerts: deque[Alert] = deque()
        self._values = 0
        self._closing = False
        self._lock = threading.RLock()
        self.worker = Worker("gradsight-sinks", self._drain, _PERIOD)

    def start(self) -> bool:
        """Let the sinks open what they write to; whether that was to be done."""
        if self._started:
            return False
        self._started = True
        self._sinks.start()
        return True

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """A step that was made: what comes before it is complete."""
        with self._lock:
            row = self._open.setdefault(step, StepRow(step))
            row.scalars.update(scalars)
            row.histograms.update(histograms)
            self._written = step
            self._hand_over(before=step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step that was made just now, or under a count of the caller's own."""
        with self._lock:
            if self._written <= step < self._written + _AHEAD:
                self._open.setdefault(step, StepRow(step)).scalars.update(values)
            else:
                self._put(StepRow(step, dict(values)))

    def alert(self, alert: Alert) -> bool:
        """Have a finding told; whether any of the sinks tells such to people."""
        if not self._sinks.take_alerts:
            return False
        self.start()
        self._alerts.append(alert)
        return True

    def close(self) -> None:
        """Hand over what is left and close the sinks, within a bounded time."""
        try:
            titles = self._sinks.titles
            with self._lock:
                self._hand_over(before=None)
        finally:
            self._closing = True
            self.worker.end.set()
        if self.worker.stop(_PATIENCE):
            return
        # Counted for every step that is lost, and for closing.
        for _ in range(len(self._rows) + 1):
            self._problems.report(
                "sinks-slow",
                f"the sinks ({titles}) did not take everything within {_PATIENCE:.0f} s; "
                "the rest is lost",
            )

    def _hand_over(self, before: int | None) -> None:
        """Pass on the steps that nothing more comes for."""
        complete = [step for step in sorted(self._open) if before is None or step < before]
        for step in complete:
            self._put(self._open.pop(step))

    def _put(self, row: StepRow) -> None:
        # Training never waits for a sink, whatever network is behind it.
        size = _size(row)
        if size == 0:
            return
        if self._values + size > _MOST_VALUES:
            self._problems.report(
                "sinks-full",
                f"the sinks ({self._sinks.titles}) are slower than training: some steps are not "
                "shown there",
            )
            return
        self._rows.append(row)
        self._values += size

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._rows:
                    break
                row = self._rows.popleft()
                self._values -= _size(row)
            self._sinks.log_step(row)
        while self._alerts:
            self._sinks.alert(self._alerts.popleft())
        if self._closing:
            self._sinks.close()


def _size(row: StepRow) -> int:
    return len(row.scalars) + _HISTOGRAM_VALUES * len(row.histograms)
