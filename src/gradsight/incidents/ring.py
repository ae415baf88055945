"""The last steps' statistics in memory, bounded in bytes.

What an incident shows of the way that led to it. No torch.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.values.measured import MeasuredStep

MOST_BYTES = 4 * 2**20
_STEP_BYTES = 400
"""What one step takes beside its arrays, generously."""
SCALARS = ("loss", "lr", "total_norm", "clip_coef", "scale")


class Ring:
    """Steps with their norms by parameter; the oldest leave when the limit is reached."""

    def __init__(self, names: Sequence[str], most_bytes: int = MOST_BYTES) -> None:
        self._names = list(names)
        self._most_bytes = most_bytes
        self._steps: deque[MeasuredStep] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, measured: MeasuredStep) -> None:
        """One step. Its arrays are kept, not copied; its details are not."""
        # Histograms of the last steps would take more than all norms together.
        measured = replace(measured, details=None, rank_comparisons=())
        self._steps.append(measured)
        self.bytes += _size(measured)
        while self.bytes > self._most_bytes and len(self._steps) > 1:
            self.bytes -= _size(self._steps.popleft())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """One array per quantity, the oldest step first; NaN where something was not measured."""
        shape = (len(self._steps), len(self._names))
        l2 = np.full(shape, np.nan)
        max_abs = np.full(shape, np.nan)
        for place, measured in enumerate(self._steps):
            if measured.norms is not None:
                where = slice(None) if measured.rows is None else list(measured.rows)
                l2[place, where] = measured.norms.l2
                max_abs[place, where] = measured.norms.max_abs
        steps = [measured.step for measured in self._steps]
        scalars = {
            name: np.array([_number(getattr(step, name)) for step in steps]) for name in SCALARS
        }
        losses = [_number(_loss(measured)) for measured in self._steps]
        return {
            "step": np.array([step.step for step in steps], dtype=np.int64),
            "time": np.array([step.time for step in steps]),
            "skipped": np.array([step.skipped for step in steps], dtype=bool),
            **scalars,
            "loss": np.array(losses),
            "l2": l2,
            "max_abs": max_abs,
        }

    def summary(self) -> dict[str, Any]:
        """What the arrays are of, for the incident's own file."""
        if not self._steps:
            return {}
        return {
            "first_step": self._steps[0].step.step,
            "last_step": self._steps[-1].step.step,
            "parameters": self._names,
        }


def _size(measured: MeasuredStep) -> int:
    """The bytes that a step takes."""
    size = _STEP_BYTES
    if measured.norms is not None:
        size += measured.norms.l2.nbytes + measured.norms.max_abs.nbytes
    if measured.rows is not None:
        size += 8 * len(measured.rows)
    return size


def _loss(measured: MeasuredStep) -> float | None:
    """The loss that was logged, or else the one that was seen."""
    return measured.signals.loss if measured.step.loss is None else measured.step.loss


def _number(value: float | None) -> float:
    return math.nan if value is None else value
