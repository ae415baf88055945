"""A trainer's own loggers as a sink: they get each step as one row, under names of ours."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from gradsight.core.problems import say

_OURS = ("gradients/", "health/", "memory/")
"""What is sent as it is called; the user's own numbers are in their loggers already."""
_RENAMED = {"loss": "gradsight/loss", "lr": "gradsight/lr"}
"""Beside numbers of the user's that are likely called so."""


class LoggerSink:
    """Takes rows on the thread of the sinks, and hands them over on the one that trains.

    No logger is made for two threads: the trainer calls it too.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[int, dict[str, float]]] = deque()
        self._failed: set[int] = set()

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take one number."""
        self.log_scalars({name: value}, step)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take many numbers of one step at once."""
        row = {name: value for name, value in values.items() if name.startswith(_OURS)}
        row |= {ours: values[name] for name, ours in _RENAMED.items() if name in values}
        if row:
            self._rows.append((step, row))

    def hand_over(self, loggers: Mapping[int, Any]) -> None:
        """Log all that has come, by each logger's function of (values, step); by their ids."""
        while self._rows:
            step, row = self._rows.popleft()
            for key, log in loggers.items():
                if key in self._failed:
                    continue
                try:
                    log(row, step)
                except Exception as error:
                    self._failed.add(key)
                    owner = type(getattr(log, "__self__", log)).__name__
                    what = f"{type(error).__name__}: {error}"
                    say(f"the logger {owner} failed and gets no more gradients: {what}")
