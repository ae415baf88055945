"""What is usual for every parameter.

Median and spread of the logarithm of its gradient's norm over the last steps.

The spread is the median distance from the median (MAD), scaled so that it is the standard deviation
where values are normal. One wild value moves neither. What is not finite never enters, and during
an incident nothing does: an incident must not become the norm that it is measured against. One that
lasts is a new level, and the baseline starts again.
"""

from math import exp, log

import numpy as np

from gradsight.values.measured import Floats

LENGTH = 50
REFRESH = 10
"""Steps from one look at the past to the next.

While norms still fall fast, an older look would hide a spike.
"""
WARM_UP = 10
NEW_LEVEL = 25
NORMAL = 1.4826
LEAST_SPREAD = 0.05
OUTLIER = (10.0, 8.0)
"""From here on a step is kept out: tenfold the median, and this many spreads above it."""
_FLOOR = -100.0
"""The logarithm that stands for zero."""
_CEILING = 700.0
"""The logarithm that stands for infinity."""
_LEAST = exp(_FLOOR)
NOTHING_AT_ALL = _FLOOR / 2
"""A usual logarithm below this one is no gradient at all."""


class Baseline:
    """A rolling baseline of n parameters and, last, of the total."""

    __slots__ = ("_bounds", "_count", "_held", "_ring", "median", "spread")

    def __init__(self) -> None:
        self._ring: Floats | None = None
        self._count = 0
        self._held = 0
        self.median: Floats | None = None
        """None until warmed up."""
        self.spread: Floats | None = None
        self._bounds: dict[tuple[float, float], Floats] = {}

    def bound(self, factor: float, sigmas: float, size: int) -> Floats | None:
        """The `logarithms` that are both so many times the usual and so many spreads above it.

        None during warm-up.
        """
        if self.median is None or self.spread is None or size != len(self.median):
            return None
        key = (factor, sigmas)
        if key not in self._bounds:
            bound = self.median + np.maximum(log(factor), sigmas * self.spread)
            self._bounds[key] = np.where(
                self.median > NOTHING_AT_ALL, bound, np.inf
            )  # nothing at all has no multiple
        return self._bounds[key]

    def highest_total(self) -> float:
        """Return the highest total of the last steps, without the first steps of the run."""
        if self._ring is None:
            return 0.0
        totals = self._ring[: self._count, -1]
        oldest = max(self._count - LENGTH, 0)
        if oldest < WARM_UP:
            totals = np.delete(totals, slice(oldest, WARM_UP))
        return exp(totals.max()) if len(totals) else 0.0

    def enter(self, row: Floats, finite: bool) -> None:
        """Take in the `logarithms` of a step, unless they are far outside or not finite."""
        if not finite or self._is_outlier(row):
            self._held += 1
            if self._held < NEW_LEVEL or not finite:
                return
            self._forget()
        self._held = 0
        if self._ring is None or self._ring.shape[1] != len(row):
            self._ring = np.empty((LENGTH, len(row)))
            self._count = 0
        self._ring[self._count % LENGTH] = row
        self._count += 1
        if self._count >= WARM_UP and self._count % REFRESH == 0:
            self._refresh(self._ring[: min(self._count, LENGTH)])

    def _is_outlier(self, row: Floats) -> bool:
        """Whether the step's total is far outside; single parameters may jump as they like."""
        bound = self.bound(*OUTLIER, len(row))
        return bound is not None and bool(row[-1] > bound[-1])

    def _forget(self) -> None:
        """Start again: what has stayed far outside is the new level."""
        self._ring = None
        self._count = 0
        self.median = None
        self.spread = None
        self._bounds = {}

    def _refresh(self, rows: Floats) -> None:
        self._bounds = {}
        self.median = np.median(rows, axis=0)
        # The median distance, not a standard deviation: one spike must not widen what is usual.
        deviation = np.median(np.abs(rows - self.median), axis=0)
        self.spread = np.maximum(NORMAL * deviation, LEAST_SPREAD)


def logarithms(l2: Floats, total: float, ordinary: bool = False) -> Floats:
    """Natural logarithms of norms and, last, of the total.

    Zero and nothing at all are a very small number.

    `ordinary`: all of them are known to be finite and above zero.

    >>> logarithms(np.array([1.0, 0.0]), 1.0).tolist()
    [0.0, -100.0, 0.0]
    """
    # The total is a column like the others, so that one comparison serves all of them.
    result = np.empty(len(l2) + 1)
    result[:-1], result[-1] = l2, total
    if ordinary:
        return np.log(result, out=result)
    np.log(np.maximum(result, _LEAST), out=result)
    return np.nan_to_num(result, copy=False, nan=_FLOOR, posinf=_CEILING)
