"""Steps become columns by minimum and maximum, in levels; single steps around findings. No torch.

A screen has some two thousand columns. A column keeps the lowest and the highest norm of its steps,
so that a spike and a dip of one step both survive; a mean would hide either. Columns are groups of
a power of two of steps, counted from the first: a coarser level is made of a finer one, and a run
that grows changes its last column only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradsight.show.page.heights import Heights

Places = npt.NDArray[np.intp]

FAR = 6.0
"""Spreads from the usual beyond which a column shows its furthest step, and not its middle.

With 4, one step in a thousand of plain noise is beyond: a spread of 50 steps is itself uncertain.
"""
LEVEL_FACTOR = 8
"""How many columns of a level make one of the next coarser."""


@dataclass(frozen=True)
class Columns:
    """Columns of the picture. Arrays are [columns, rows]."""

    starts: npt.NDArray[np.int64]
    """The first step of each column."""
    lasts: npt.NDArray[np.int64]
    """The last step that is in it."""
    counts: npt.NDArray[np.int64]
    low: Heights
    """The lowest that is a number; the highest where none is."""
    high: Heights
    """The highest; NaN where any is NaN, no gradient where none has one."""
    deviation: Heights
    """In spreads: the furthest where that is far, else the mean; NaN where it is not known."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def is_whole(self) -> bool:
        """Whether every column is a single step."""
        return bool((self.counts == 1).all())


@dataclass(frozen=True)
class Grid:
    """Where columns begin: every so many steps, and at every step near a finding."""

    factor: int
    """Steps of an ordinary column, a power of two."""
    zones: tuple[tuple[int, int], ...] = ()
    """Positions among the steps, from and to (not included), where each has its own column."""

    def edges(self, first: int, last: int) -> Places:
        """The positions in [first, last) at which a column begins; the first is always one."""
        begin = -(-first // self.factor) * self.factor
        parts = [np.array([first]), np.arange(begin, last, self.factor)]
        for low, high in self.zones:
            # One more than the zone: a column must begin where it ends.
            parts.append(np.arange(max(low, first), min(high + 1, last)))
        return np.unique(np.concatenate(parts)).astype(np.intp)


def grid_factor(steps: int, most: int) -> int:
    """The smallest power of two that makes at most so many columns of so many steps.

    >>> grid_factor(1000, 2048), grid_factor(100_000, 2048)
    (1, 64)
    """
    factor = 1
    while steps > most * factor:
        factor *= 2
    return factor


def reduce_steps(
    steps: npt.NDArray[np.int64], heights: Heights, deviations: Heights, edges: Places
) -> Columns:
    """Steps as columns that begin at these positions; heights and deviations are [steps, rows]."""
    ends = np.append(edges[1:], len(steps))
    high = in_groups(np.maximum, heights, edges)
    lows = np.where(np.isfinite(heights), heights, np.float32(np.nan))
    low = in_groups(np.fmin, lows, edges)
    return Columns(
        starts=steps[edges],
        lasts=steps[ends - 1],
        counts=(ends - edges).astype(np.int64),
        low=np.where(np.isnan(low), high, low),
        high=high,
        deviation=_furthest_or_mean(deviations, np.ones(len(steps)), edges),
    )


def coarser(columns: Columns, edges: Places) -> Columns:
    """Columns put together, in groups that begin at these positions among them."""
    ends = np.append(edges[1:], len(columns))
    high = in_groups(np.maximum, columns.high, edges)
    lows = np.where(np.isfinite(columns.low), columns.low, np.float32(np.nan))
    low = in_groups(np.fmin, lows, edges)
    return Columns(
        starts=columns.starts[edges],
        lasts=columns.lasts[ends - 1],
        counts=np.add.reduceat(columns.counts, edges),
        low=np.where(np.isnan(low), high, low),
        high=high,
        deviation=_furthest_or_mean(columns.deviation, columns.counts, edges),
    )


def _furthest_or_mean(
    deviations: Heights, weights: npt.NDArray[np.generic], edges: Places
) -> Heights:
    """The furthest of each group where it is far from the usual, else the mean of what is known."""
    # Shown by its furthest step alone, plain noise of many steps would look like a bar code.
    above = in_groups(np.fmax, deviations, edges)
    below = in_groups(np.fmin, deviations, edges)
    known = ~np.isnan(deviations)
    weight = known * weights[:, None].astype(np.float32)
    sums = in_groups(np.add, np.where(known, deviations, 0) * weight, edges)
    total = in_groups(np.add, weight, edges)
    mean = np.divide(sums, total, out=np.full_like(sums, np.nan), where=total > 0)
    furthest = np.where(above >= -below, above, below)
    return np.where(np.abs(furthest) > FAR, furthest, mean).astype(np.float32)


def in_groups(operation: np.ufunc, values: Heights, edges: Places) -> Heights:
    """What an operation makes of groups of rows that begin at these positions.

    As `operation.reduceat(values, edges, axis=0)`, six times faster: groups of the same size, and
    nearly all are, are one array of a dimension more.

    >>> in_groups(np.add, np.array([[1], [2], [3], [4], [5]]), np.array([0, 2, 4])).tolist()
    [[3], [7], [5]]
    """
    sizes = np.diff(np.append(edges, len(values)))
    starts = np.flatnonzero(np.diff(sizes, prepend=-1))
    parts = []
    for first, last in zip(starts, [*starts[1:], len(sizes)], strict=True):
        size = sizes[first]
        stretch = values[edges[first] : edges[first] + size * (last - first)]
        if size > 1:
            stretch = operation.reduce(stretch.reshape(last - first, size, -1), axis=1)
        parts.append(stretch)
    return np.concatenate(parts)


def joined(parts: Sequence[Columns]) -> Columns:
    """Columns one after the other."""
    return Columns(
        starts=np.concatenate([part.starts for part in parts]),
        lasts=np.concatenate([part.lasts for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        low=np.concatenate([part.low for part in parts]),
        high=np.concatenate([part.high for part in parts]),
        deviation=np.concatenate([part.deviation for part in parts]),
    )


def coarsened(columns: Columns, grid: Grid) -> Columns:
    """A level of a coarser grid with the same zones."""
    begins = np.concatenate([[0], np.cumsum(columns.counts)[:-1]])
    wanted = grid.edges(0, int(columns.counts.sum()))
    return coarser(columns, np.flatnonzero(np.isin(begins, wanted)))


def zones_around(places: Iterable[int], half: int, steps: int) -> tuple[tuple[int, int], ...]:
    """Stretches of so many steps on both sides of some positions, those that meet made one.

    >>> zones_around([5, 12, 90], half=4, steps=92)
    ((1, 17), (86, 92))
    """
    zones: list[tuple[int, int]] = []
    for place in sorted(places):
        low = max(0, place - half)
        high = min(steps, place + half + 1)
        if zones and low <= zones[-1][1]:
            zones[-1] = (zones[-1][0], high)
        else:
            zones.append((low, high))
    return tuple(zones)
