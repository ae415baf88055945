"""GS202: a steady rise."""

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np

from gradsight.health.fixes import CLIP, LOWER_RATE
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.measured import Floats

_TEN = 10
"""Norms whose median is a level: one wild step is none."""


@check(
    "GS202",
    "rising gradient",
    "warning",
    asked=Asked(when="stretch"),
    advice=Advice(
        recommendation=(
            "The gradient builds up to an explosion: clip before it comes, lower the learning "
            "rate, look for a loss that rises with it."
        ),
        fix=CLIP,
        if_clipped=Advice(
            recommendation=(
                "The gradient builds up behind the clipping, which hides it from the optimizer "
                "only: lower the learning rate, look for a loss that rises with it."
            ),
            fix=LOWER_RATE,
        ),
    ),
)
def rise(
    window: Window,
    *,
    factor: float = 10.0,
    least: float = 10.0,
    stretch: int = 40,
    straight: int = 180,
) -> Iterator[Fact]:
    """The gradient rises steadily, and is beyond the healthy range.

    Why: an explosion announces itself; here there is still time. Growth within the ordinary range
    (0.1 to 10) is left alone, and so is a rise that levels off: a warm-up.
    """
    # Twenty norms are looked at before the medians of all: early ends like this made judging a step
    # two to three times cheaper.
    if len(window.totals) < stretch or max(islice(reversed(window.totals), 20)) < least:
        return
    totals = np.array(window.totals)
    rising = _steep(totals[-4 * stretch :], factor, least)
    if rising is None:
        rising = _straight(totals, factor, least, straight)
    if rising is not None and window.converging is not True:
        quarters = " → ".join(f"{value:.3g}" for value in _quarters(rising))
        evidence = f"median norm by quarter of the last {len(rising)} steps: {quarters}"
        yield Fact(evidence, window.largest())


def _steep(totals: Floats, factor: float, least: float) -> Floats | None:
    """These norms, if they rise by so much from quarter to quarter that they speed up."""
    quarters = _quarters(totals)
    # A straight line from zero has a last quarter of seven times the first, and none has more.
    if _climbs(quarters, 1.3) and quarters[3] > max(least, factor * quarters[0]):
        return totals
    return None


def _straight(totals: Floats, factor: float, least: float, shortest: int) -> Floats | None:
    """The norms since the lowest, if they have risen from there at an even pace."""
    # A shorter one at an even pace may be a warm-up; one that speeds up is found before that.
    if len(totals) < shortest:
        return None
    tens = totals[len(totals) % _TEN :].reshape(-1, _TEN)
    levels = np.median(tens, axis=1)
    lowest = levels.min()
    if levels[-1] <= max(least, factor * lowest):
        return None
    # Not the lowest itself, which lies anywhere where a rise has a level stretch before it.
    begin = int(np.flatnonzero(levels <= 1.3 * lowest)[-1])
    rising = tens[begin:].ravel()
    if len(rising) < shortest:
        return None
    quarters = _quarters(rising)
    pace = (quarters[3] - quarters[0]) / 3
    levels_off = quarters[3] - quarters[2] < 0.5 * pace
    if levels_off or not _climbs(quarters, 1.2) or not _stands_clear(rising):
        return None
    return rising


def _quarters(totals: Floats) -> list[float]:
    """The median of each quarter."""
    return [float(np.median(part)) for part in np.array_split(totals, 4)]


def _stands_clear(totals: Floats) -> bool:
    """Whether the last quarter lies above the first, apart from a wild tenth of either."""
    quarters = np.array_split(totals, 4)
    return bool(np.quantile(quarters[3], 0.1) > np.quantile(quarters[0], 0.9))


def _climbs(quarters: list[float], times: float) -> bool:
    """Whether each quarter is so many times the one before."""
    return all(later > times * earlier for earlier, later in pairwise(quarters))
