"""Numbers about one dumped gradient, exact, over every entry. No torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gradsight.core import limits
from gradsight.dump.values import Values

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
BINS = 24


@dataclass(frozen=True, slots=True)
class Statistics:
    """One gradient in numbers: of its finite entries, a complex entry counting as two."""

    count: int
    norm: float
    minimum: float
    maximum: float
    mean: float
    quantiles: tuple[float, ...]
    """At 1, 25, 50, 75 and 99 percent; none of a gradient that is too large to be sorted."""
    zeros: int
    nan: int
    inf: int
    histogram: tuple[int, ...]
    """Counts in BINS equal bins from minimum to maximum."""


def measure(values: Values | Iterable[Values]) -> Statistics:
    """Look at every entry of a gradient, whole or in blocks, which are asked for twice."""
    blocks: Iterable[Values] = [values] if isinstance(values, np.ndarray) else values
    first = _First()
    for block in blocks:
        first.add(block)
    if not first.finite:
        nothing = float("nan")
        quantiles = (nothing,) * len(QUANTILES)
        empty = Statistics(0, nothing, nothing, nothing, nothing, quantiles, 0, 0, 0, (0,) * BINS)
        return replace(empty, count=first.count, nan=first.nan, inf=first.inf)
    low = first.low
    high = first.high
    # One value alone gets bins of its own width, as numpy does by itself.
    spread = (low, high) if high > low else (low - 0.5, low + 0.5)
    # Scaled, so that squares neither overflow nor vanish.
    largest = max(abs(low), abs(high)) or 1.0
    squares = 0.0
    counts = np.zeros(BINS, np.int64)
    kept = []
    for block in blocks:
        finite = _finite(block)
        squares += float(np.square(finite / largest).sum())
        counts += np.histogram(finite, bins=BINS, range=spread)[0]
        if first.count <= limits.ENTRIES_SORTED:
            kept.append(finite)
    quantiles = ()
    if kept:
        quantiles = tuple(float(each) for each in np.quantile(np.concatenate(kept), QUANTILES))
    return Statistics(
        count=first.count,
        norm=largest * math.sqrt(squares),
        minimum=low,
        maximum=high,
        mean=first.mean,
        quantiles=quantiles,
        zeros=first.zeros,
        nan=first.nan,
        inf=first.inf,
        histogram=tuple(int(count) for count in counts),
    )


class _First:
    """What one look at all blocks tells."""

    def __init__(self) -> None:
        self.count = 0
        self.finite = 0
        self.nan = 0
        self.inf = 0
        self.zeros = 0
        self.low = math.inf
        self.high = -math.inf
        self._means: list[tuple[int, float]] = []

    def add(self, block: Values) -> None:
        """One block more."""
        flat = _flat(block)
        finite = _finite(block)
        self.count += len(flat)
        self.finite += len(finite)
        self.nan += int(np.isnan(flat).sum())
        self.inf += int(np.isinf(flat).sum())
        self.zeros += int((finite == 0).sum())
        if len(finite):
            self.low = min(self.low, float(finite.min()))
            self.high = max(self.high, float(finite.max()))
            # Not their sum, which can be beyond the largest number.
            self._means.append((len(finite), float((finite / len(finite)).sum())))

    @property
    def mean(self) -> float:
        """The mean over all finite entries."""
        return math.fsum(count / self.finite * mean for count, mean in self._means)


def _flat(block: Values) -> Values:
    """The entries one after the other, a complex one as two."""
    flat = np.ascontiguousarray(block).reshape(-1)
    if np.iscomplexobj(flat):
        flat = flat.view(flat.real.dtype)
    return flat


def _finite(block: Values) -> npt.NDArray[np.float64]:
    """The finite entries, in double precision; always a copy."""
    flat = _flat(block)
    return flat[np.isfinite(flat)].astype(np.float64)
