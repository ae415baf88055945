"""Sinks that may fail: training and the other sinks go on, and what is not kept is counted."""

from collections.abc import Mapping
from typing import Any

from gradsight.core.problems import Problems
from gradsight.store.sinks.step_sink import Alert, StepRow, StepSink
from gradsight.values.histograms import Histogram

_TITLES = {"WandbSink": "W&B", "TrackioSink": "Trackio", "TensorBoardSink": "TensorBoard"}


class GuardedSinks:
    """Hands numbers to sinks; one that fails is switched off."""

    def __init__(self, sinks: list[Any], problems: Problems) -> None:
        self._sinks = sinks
        self._problems = problems
        self._faults: dict[int, str] = {}
        """Of the sinks that are switched off, by their place."""

    @property
    def titles(self) -> str:
        """The sinks by name, for messages."""
        return ", ".join(_title(sink) for sink in self._sinks)

    def start(self) -> None:
        """Let ours open what they write to."""
        for place, sink in enumerate(self._sinks):
            if isinstance(sink, StepSink):
                self._try(place, "start")

    def log_step(self, row: StepRow) -> None:
        """All there is of a step: at once where a sink can take it so, else in parts."""
        for place, sink in enumerate(self._sinks):
            if isinstance(sink, StepSink):
                self._try(place, "log_step", row)
                continue
            self._log_scalars(place, row.scalars, row.step)
            if hasattr(sink, "log_histogram"):
                for name, histogram in row.histograms.items():
                    self._try(place, "log_histogram", name, histogram, row.step)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Some numbers of a step."""
        for place in range(len(self._sinks)):
            self._log_scalars(place, values, step)

    def log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """One histogram."""
        self._each("log_histogram", name, histogram, step)

    @property
    def take_alerts(self) -> bool:
        """Whether any of them tells people of findings."""
        return any(hasattr(sink, "alert") for sink in self._sinks)

    def alert(self, alert: Alert) -> None:
        """Tell of a finding where that can be done."""
        self._each("alert", alert)

    def close(self) -> None:
        """Close those that are still at work."""
        self._each("close")
        self._sinks = []

    def _each(self, method: str, *args: Any) -> None:
        for place, sink in enumerate(self._sinks):
            if hasattr(sink, method):
                self._try(place, method, *args)

    def _log_scalars(self, place: int, values: Mapping[str, float], step: int) -> None:
        if hasattr(self._sinks[place], "log_scalars"):
            self._try(place, "log_scalars", values, step)
            return
        for name, value in values.items():
            self._try(place, "log_scalar", name, value, step)

    def _try(self, place: int, method: str, *args: Any) -> None:
        sink = self._sinks[place]
        fault = self._faults.get(place)
        if fault is None:
            try:
                getattr(sink, method)(*args)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                fault = f"the sink {_title(sink)} failed and is switched off: {what}"
                self._faults[place] = fault
        # Also of all that comes later: the count says how much the sink has missed.
        if fault is not None and method != "close":
            self._problems.report(f"sink-{_title(sink)}", fault)


def _title(sink: Any) -> str:
    name = type(sink).__name__
    return _TITLES.get(name, name)
