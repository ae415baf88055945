"""Loss, learning rate and so on of a run that grows, as arrays that grow with it. No torch."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradsight.show.page.series import LINES, line
from gradsight.values.steps import Step


class LiveLines:
    """What is known of every step so far, by name."""

    def __init__(self) -> None:
        self._steps = {name: array("q") for name in LINES}
        self._values = {name: array("d") for name in LINES}

    def add(self, steps: Sequence[Step]) -> None:
        """Further steps; the first of them may be the last one again, with more known of it."""
        for name in LINES:
            numbers = self._steps[name]
            values = self._values[name]
            if steps and numbers and numbers[-1] >= steps[0].step:
                numbers.pop()
                values.pop()
            for step in steps:
                value = getattr(step, name)
                if value is not None:
                    numbers.append(step.step)
                    values.append(value)

    def thinned(self) -> dict[str, Any]:
        """The lines as the page takes them; one that was never recorded is missing."""
        shown = {}
        for name in LINES:
            if self._steps[name]:
                # Copies: an array that somebody looks into cannot grow.
                numbers = np.array(self._steps[name], dtype=np.int64)
                shown[name] = line(numbers, np.array(self._values[name], dtype=np.float64))
        return shown
