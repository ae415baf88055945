"""What is usual for one number: the same as `Baseline` of a single column, in plain Python, for the
thread that trains.
"""

from collections import deque
from statistics import median

from gradsight.health.baseline import LEAST_SPREAD, LENGTH, NEW_LEVEL, NORMAL, REFRESH, WARM_UP

_OUTLIER = (2.302585092994046, 8.0)  # tenfold, and this many spreads


class Usual:
    """A rolling median and spread of a logarithm."""

    __slots__ = ("_count", "_held", "_median", "_ring", "_spread")

    def __init__(self) -> None:
        self._ring: deque[float] = deque(maxlen=LENGTH)
        self._count = self._held = 0
        self._median: float | None = None
        self._spread = LEAST_SPREAD

    def excess(self, value: float) -> tuple[float, float] | None:
        """By how much a value exceeds the median, and that in spreads; None during warm-up."""
        if self._median is None:
            return None
        return value - self._median, (value - self._median) / self._spread

    def enter(self, value: float) -> None:
        """Take in a step's value, unless it is far outside; what stays there is the new level."""
        found = self.excess(value)
        if found is not None and found[0] > _OUTLIER[0] and found[1] > _OUTLIER[1]:
            self._held += 1
            if self._held < NEW_LEVEL:
                return
            self._ring.clear()
            self._count, self._median = 0, None
        self._held = 0
        self._ring.append(value)
        self._count += 1
        if self._count >= WARM_UP and self._count % REFRESH == 0:
            self._median = median(self._ring)
            self._spread = max(
                NORMAL * median([abs(each - self._median) for each in self._ring]), LEAST_SPREAD
            )
