"""Numbers as text that fits a terminal: short figures, sparklines, bars."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

_LEVELS = "▁▂▃▄▅▆▇█"


def figure(value: float | None) -> str:
    """Three digits, whatever the size.

    >>> figure(0.00012345), figure(123456.0), figure(1.5), figure(None), figure(float("nan"))
    ('1.23e-04', '1.23e+05', '1.5', '–', 'NaN')
    """
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if value == math.inf:
        return "Inf"
    if value == -math.inf:
        return "-Inf"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    return f"{value:.2e}"


def sparkline(values: Sequence[float] | npt.NDArray[np.float64], width: int = 24) -> str:
    """A curve on a logarithmic scale, one sign per stretch of steps; '!' where one is not finite.

    A stretch is as high as its largest value: a single step's spike must be seen.

    >>> sparkline([1, 10, 100, 1000])
    '▁▃▆█'
    >>> sparkline([1, 1, 1, 1000, 1, 1], width=3)
    '▁█▁'
    >>> sparkline([1, float("nan"), 1])
    '▄!▄'
    """
    values = np.asarray(values, dtype=np.float64)  # a long run's are too many for a loop
    count = min(len(values), width)
    edges = [len(values) * place // max(count, 1) for place in range(count + 1)]
    heights = [_height(values[start:end]) for start, end in pairwise(edges)]
    finite = [height for height in heights if height is not None]
    low = min(finite, default=0.0)
    high = max(finite, default=0.0)
    return "".join(
        "!" if height is None else _LEVELS[_level(height, low, high)] for height in heights
    )


def _height(stretch: npt.NDArray[np.float64]) -> float | None:
    """The logarithm of a stretch's largest value; None where something in it is not finite."""
    if not np.isfinite(stretch).all():
        return None
    # Zero has no logarithm; this is the smallest number that a float32 holds.
    return math.log10(max(float(stretch.max()), 1e-45))


def _level(height: float, low: float, high: float) -> int:
    if high - low < 0.01:  # a flat curve is drawn in the middle, not blown up
        return 3
    return round((height - low) / (high - low) * (len(_LEVELS) - 1))


def trend(values: Sequence[float | None], low: float, high: float) -> str:
    """A curve on a plain scale from low to high; a stretch without a value is empty.

    >>> trend([-1.0, 0.0, None, 1.0], -1.0, 1.0)
    '▁▅ █'
    """
    return "".join(
        " " if value is None else _LEVELS[_plain_level(value, low, high)] for value in values
    )


def _plain_level(value: float, low: float, high: float) -> int:
    if high <= low:
        return 3
    return int((value - low) / (high - low) * (len(_LEVELS) - 1) + 0.5)


def bar(share: float, width: int = 30) -> str:
    """A bar for a share of 1.

    >>> bar(0.5, 4)
    '██'
    """
    return "█" * round(share * width)
