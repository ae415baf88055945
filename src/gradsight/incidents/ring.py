"""The last steps' statistics in memory, bounded in bytes: what an incident shows of the way that
led to it. No torch.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.values.steps import Step

Floats = npt.NDArray[np.float64]

MOST_BYTES = 4 * 2**20
_STEP_BYTES = 400
"""What one step takes beside its arrays, generously."""
SCALARS = ("loss", "lr", "total_norm", "clip_coef", "scale")


class Ring:
    """Steps with their norms by parameter; the oldest leave when the limit is reached."""

    def __init__(self, names: Sequence[str], most_bytes: int = MOST_BYTES) -> None:
        self._names = list(names)
        self._most_bytes = most_bytes
        self._steps: deque[
            tuple[Step, float | None, Sequence[int] | None, Floats | None, Floats | None, int]
        ] = deque()
        self.width = len(self._names)
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        step: Step,
        loss: float | None,
        rows: Sequence[int] | None,
        l2: Floats | None,
        max_abs: Floats | None,
    ) -> None:
        """One step; `rows`: the parameters that the arrays are of, None for all. Arrays are kept,
        not copied.
        """
        size = _STEP_BYTES + (0 if l2 is None or max_abs is None else l2.nbytes + max_abs.nbytes)
        size += 0 if rows is None else 8 * len(rows)
        self._steps.append((step, loss, rows, l2, max_abs, size))
        self.bytes += size
        while self.bytes > self._most_bytes and len(self._steps) > 1:
            self.bytes -= self._steps.popleft()[-1]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """One array per quantity, the oldest step first; NaN where something was not measured."""
        count, size = len(self._steps), len(self._names)
        steps = [entry[0] for entry in self._steps]
        tables = {name: np.full((count, size), np.nan) for name in ("l2", "max_abs")}
        for place, (_, _, rows, l2, max_abs, _) in enumerate(self._steps):
            if l2 is not None:
                where = slice(None) if rows is None else list(rows)
                tables["l2"][place, where], tables["max_abs"][place, where] = l2, max_abs
        scalars = {
            name: np.array([_number(getattr(step, name)) for step in steps]) for name in SCALARS
        }
        seen = [_number(loss) if step.loss is None else step.loss for step, loss, *_ in self._steps]
        return {
            "step": np.array([step.step for step in steps], dtype=np.int64),
            "time": np.array([step.time for step in steps]),
            "skipped": np.array([step.skipped for step in steps], dtype=bool),
            **scalars,
            "loss": np.array(seen),
            **tables,
        }

    def summary(self) -> dict[str, Any]:
        """What the arrays are of, for the incident's own file."""
        steps = [entry[0].step for entry in self._steps]
        return (
            {"first_step": steps[0], "last_step": steps[-1], "parameters": self._names}
            if steps
            else {}
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
