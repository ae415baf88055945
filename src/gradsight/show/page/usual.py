"""How far every norm is from what is usual for its row, in spreads: what the judge sees. No torch.

The usual is the median of the logarithms of the last 50 steps, and the spread their median distance
from it, scaled to a standard deviation. Both are looked at anew every 10 steps. A step whose total
is far outside, or that is not finite, stays out; what stays outside for 25 steps is a new level.
So it is done in `health/baseline.py`, step by step; here it is done for thousands of steps at once,
and the tests hold the one against the other.
"""

from dataclasses import dataclass, field
from math import log

import numpy as np
import numpy.typing as npt

from gradsight.show.page.heights import ABSENT, ZERO, Heights

_LENGTH = 50
_REFRESH = 10
_WARM_UP = 10
_NEW_LEVEL = 25
_NORMAL = 1.4826
_LEAST_SPREAD = 0.05
_FACTOR = 10.0
_SIGMAS = 8.0
_FLOOR = -100.0
"""The natural logarithm that stands for zero and for no gradient at all."""
_LANES = 20_000
"""Medians that are taken at once: their windows fit the processor's cache."""


@dataclass
class TotalBaseline:
    """Which steps enter the baseline, and when it is looked at anew: the total alone decides."""

    held: int = 0
    recent: list[float] = field(default_factory=list)
    """The totals that have entered since the last start, the last 50 of them."""
    count: int = 0
    bound: float = np.inf

    def enter(self, total: float, finite: bool) -> tuple[bool, bool]:
        """Whether this step enters, and whether everything starts again with it."""
        outlier = total > self.bound
        begins = False
        if not finite or outlier:
            self.held += 1
            if self.held < _NEW_LEVEL or not finite:
                return False, False
            begins = True
            self.recent.clear()
            self.count = 0
            self.bound = np.inf
        self.held = 0
        self.recent.append(total)
        del self.recent[:-_LENGTH]
        self.count += 1
        return True, begins

    def is_due(self) -> bool:
        """Whether medians are taken after the step that has just entered."""
        return self.count >= _WARM_UP and self.count % _REFRESH == 0

    def refresh(self) -> None:
        """Take the median and the spread of the total."""
        usual = _median(self.recent)
        spread = _NORMAL * _median([abs(each - usual) for each in self.recent])
        self.bound = np.inf
        if usual > _FLOOR / 2:
            self.bound = usual + max(log(_FACTOR), _SIGMAS * max(spread, _LEAST_SPREAD))


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


class Usual:
    """The baseline of every row, carried on from one stretch of steps to the next."""

    def __init__(self, rows: int) -> None:
        self._total = TotalBaseline()
        self._past = np.zeros((0, rows), dtype=np.float32)
        """The logarithms that have entered, newest last: those that a median can still ask for."""
        self._median = np.full((1, rows), np.nan, dtype=np.float32)
        self._spread = np.ones((1, rows), dtype=np.float32)

    def deviations(
        self, heights: Heights, totals: npt.NDArray[np.float64], finite: npt.NDArray[np.bool_]
    ) -> Heights:
        """In spreads, [steps, rows]; NaN where there is no number or nothing is known as usual.

        totals: the natural logarithm of the whole gradient's norm at each step; finite: whether no
        gradient of the step holds a NaN or an infinity.
        """
        logarithms = _logarithms(heights)
        plan = self._plan(totals, finite)
        history = np.concatenate([self._past, logarithms[plan.entered]])
        medians, spreads = _medians(history, plan)
        # First what was in force before, and last what is when nothing is known.
        medians = np.concatenate([self._median, medians, np.full_like(self._median, np.nan)])
        spreads = np.concatenate([self._spread, spreads, np.ones_like(self._spread)])
        # Nothing at all has no multiple: a row whose usual norm is zero cannot leave it by so much.
        medians[medians <= _FLOOR / 2] = np.nan
        self._past = history[-_LENGTH:]
        self._median = medians[plan.last][None]
        self._spread = spreads[plan.last][None]
        result: Heights = (logarithms - medians[plan.in_force]) / spreads[plan.in_force]
        result[~np.isfinite(heights)] = np.nan
        return result

    def _plan(self, totals: npt.NDArray[np.float64], finite: npt.NDArray[np.bool_]) -> "_Plan":
        """Walk over the totals: what enters, which medians are taken, which holds at each step."""
        nothing_known = -1
        current = 0  # the medians that were in force when the stretch began
        before = len(self._past)
        entered: list[int] = []
        ends: list[int] = []
        lengths: list[int] = []
        in_force = np.zeros(len(totals), dtype=np.intp)
        pairs = zip(totals.tolist(), finite.tolist(), strict=True)
        for step, (total, is_finite) in enumerate(pairs):
            # A step is compared with its past, not with itself.
            in_force[step] = current
            enters, begins = self._total.enter(total, is_finite)
            if begins:
                current = nothing_known
            if not enters:
                continue
            entered.append(step)
            if self._total.is_due():
                self._total.refresh()
                ends.append(before + len(entered))
                lengths.append(min(self._total.count, _LENGTH))
                current = len(ends)
        return _Plan(entered, ends, lengths, in_force, current)


@dataclass(frozen=True)
class _Plan:
    """What enters in a stretch of steps, and which medians are taken of it."""

    entered: list[int]
    ends: list[int]
    """By median: how many rows of the history lie before its end."""
    lengths: list[int]
    in_force: npt.NDArray[np.intp]
    """By step: 0 the medians from before, k the k-th of this stretch, -1 none at all."""
    last: int


def _logarithms(heights: Heights) -> Heights:
    """Natural logarithms as the judge takes them."""
    with np.errstate(invalid="ignore"):
        logarithms = heights * np.float32(log(2.0))
    logarithms[np.isnan(heights) | (heights == ABSENT) | (heights == ZERO)] = _FLOOR
    return np.maximum(logarithms, np.float32(_FLOOR))


def _medians(history: Heights, plan: _Plan) -> tuple[Heights, Heights]:
    """Medians and spreads, [medians, rows], of the history before each end."""
    rows = history.shape[1]
    medians = np.zeros((len(plan.ends), rows), dtype=np.float32)
    spreads = np.zeros((len(plan.ends), rows), dtype=np.float32)
    at_once = max(1, _LANES // max(1, rows))
    for length in sorted(set(plan.lengths)):
        places = [place for place, each in enumerate(plan.lengths) if each == length]
        for start in range(0, len(places), at_once):
            part = places[start : start + at_once]
            first = np.array([plan.ends[place] - length for place in part])
            windows = history[first[:, None] + np.arange(length)]
            windows.sort(axis=1)
            medians[part] = _middle(windows)
            spreads[part] = np.maximum(_NORMAL * _median_distance(windows), _LEAST_SPREAD)
    return medians, spreads


def _middle(ordered: Heights) -> Heights:
    """The median of windows in ascending order, [windows, length, rows]; lengths are even."""
    half = ordered.shape[1] // 2
    middle: Heights = (ordered[:, half - 1] + ordered[:, half]) / 2
    return middle


def _median_distance(ordered: Heights) -> Heights:
    """The median distance from the median.

    The k nearest of numbers in ascending order are neighbours, so that the k-th smallest distance
    is the least reach of any k neighbours: a minimum, where a second sorting would take longer.
    """
    half = ordered.shape[1] // 2
    middle = _middle(ordered)[:, None]
    distances = []
    for nearest in (half, half + 1):
        last = ordered.shape[1] - nearest + 1
        reach = np.maximum(middle - ordered[:, :last], ordered[:, nearest - 1 :] - middle)
        distances.append(reach.min(axis=1))
    distance: Heights = (distances[0] + distances[1]) / 2
    return distance


def total_logarithms(totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Natural logarithms of total norms, as the judge takes them.

    >>> total_logarithms(np.array([1.0, 0.0, np.nan])).tolist()
    [0.0, -100.0, -100.0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log(totals)
    values[np.isnan(values)] = _FLOOR
    return np.clip(values, _FLOOR, 700.0)
