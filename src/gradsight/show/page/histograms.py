"""Histograms over time by powers of two, and the share of zeros, for the page. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradsight.show.page.encode import packed, packed_numbers
from gradsight.show.page.heat import map_columns
from gradsight.show.page.heights import ABSENT, HeatRows, heights_of
from gradsight.show.page.pyramid import Columns
from gradsight.values.histograms import Histogram

_MOST_LOOKS = 160
_CELLS = 48_000
"""Bins of all parameters and looks that are kept beside those over all of them together."""
_RARE = 1e-5
"""The share of the entries below which a bin at either end gets no row of its own."""
_BELOW = 2.0**-25
"""The share of the entries below which a bin is drawn as empty."""


class CountedRun(Protocol):
    """What histograms are read from."""

    def histogram_steps(self) -> list[int]: ...
    def histograms_at(self, steps: Iterable[int]) -> Iterable[Histogram]: ...


@dataclass(frozen=True)
class Looks:
    """The histograms of some steps, by parameter; None stands for all together."""

    steps: list[int]
    of: int
    """How many steps have histograms."""
    by_parameter: dict[str | None, dict[int, Histogram]]


def looks_at(run: CountedRun) -> Looks:
    """Histograms of evenly chosen steps, the first and the last among them."""
    every = run.histogram_steps()
    chosen = _evenly(every, _MOST_LOOKS)
    found: dict[str | None, dict[int, Histogram]] = {}
    for histogram in run.histograms_at(chosen):
        found.setdefault(histogram.parameter, {})[histogram.step] = histogram
    return Looks(chosen, len(every), found)


def _evenly(values: Sequence[int], most: int) -> list[int]:
    """At most so many of some values, the first and the last among them.

    >>> _evenly(range(100), 4)
    [0, 33, 66, 99]
    """
    if len(values) <= most:
        return list(values)
    places = np.linspace(0, len(values) - 1, most).round().astype(int)
    return [values[place] for place in places.tolist()]


def histograms_over_time(looks: Looks, rows: HeatRows) -> dict[str, Any] | None:
    """Magnitudes by powers of two: of all gradients together, and of every parameter."""
    whole = looks.by_parameter.get(None)
    if not whole:
        return None
    low, high = _span(whole.values())
    bins = high - low
    few = _evenly(looks.steps, max(2, _CELLS // max(1, bins * len(rows.names))))
    own = np.zeros((len(rows.names), len(few), bins), dtype=np.uint8)
    sizes = []
    for place, name in enumerate(rows.names):
        known = looks.by_parameter.get(name, {})
        for look, step in enumerate(few):
            if step in known:
                own[place, look] = _codes(known[step], low, bins)
        sizes.append(max((each.size for each in known.values()), default=0))
    steps = [step for step in looks.steps if step in whole]
    together = np.array([_codes(whole[step], low, bins) for step in steps], dtype=np.uint8)
    last = whole[steps[-1]]
    return {
        "low": low,
        "bins": bins,
        "steps": packed_numbers(steps),
        "together": packed(together),
        "own_steps": packed_numbers(few),
        "own": packed(own),
        "sizes": sizes,
        "of": looks.of,
        "sampled": last.sampled if last.error else None,
        "size": last.size,
    }


def _span(histograms: Iterable[Histogram]) -> tuple[int, int]:
    """The powers of two between which nearly all entries lie; the few beyond are at its ends."""
    lows = []
    highs = []
    for each in histograms:
        tallies = np.add(each.negative, each.positive)
        filled = np.flatnonzero(tallies > _RARE * tallies.sum())
        if len(filled):
            lows.append(each.low + int(filled[0]))
            highs.append(each.low + int(filled[-1]) + 1)
    return min(lows, default=0), max(highs, default=1)


def _codes(histogram: Histogram, low: int, bins: int) -> npt.NDArray[np.uint8]:
    """The share of the entries in each bin, as ten codes per doubling; 0 is empty."""
    shares = np.zeros(bins)
    tallies = np.add(histogram.negative, histogram.positive)
    total = float(tallies.sum()) + histogram.zero + histogram.underflow
    offset = histogram.low - low
    for place, tally in enumerate(tallies.tolist()):
        if tally and total:
            shares[min(max(place + offset, 0), bins - 1)] += tally / total
    codes = 255 + 10 * np.log2(np.maximum(shares, _BELOW))
    return np.where(shares > _BELOW, np.clip(codes, 1, 255), 0).round().astype(np.uint8)


def zero_shares(looks: Looks, rows: HeatRows) -> Columns | None:
    """The share of entries that are exactly zero, as a map; None where nobody counted."""
    steps = looks.steps
    if not steps or not any(name is not None for name in looks.by_parameter):
        return None
    zero = np.zeros((len(steps), len(rows)))
    size = np.zeros((len(steps), len(rows)))
    at = {step: place for place, step in enumerate(steps)}
    for row, name in enumerate(rows.names):
        for step, each in looks.by_parameter.get(name, {}).items():
            # Counts are of a sample; blocks add up parameters of different sizes.
            size[at[step], row] = each.size
            zero[at[step], row] = each.zero * each.size / max(1, each.sampled)
    for row, members in enumerate(rows.blocks.values(), len(rows.names)):
        size[:, row] = size[:, members].sum(axis=1)
        zero[:, row] = zero[:, members].sum(axis=1)
    heights = heights_of(zero / np.maximum(size, 1))
    heights[size == 0] = ABSENT
    return map_columns(np.array(steps, dtype=np.int64), heights)
