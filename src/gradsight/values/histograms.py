"""Counts of gradient entries by sign and power of two. No torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of the gradient entries of one parameter, or (parameter None) of all together.

    `positive[k]` counts entries in [2**(low+k), 2**(low+k+1)), `negative[k]` the same of their
    magnitude. Zeros, NaN, infinities and `underflow` (not zero, but below 2**-126) are kept apart.
    Large tensors are sampled: then the counts are of `sampled` entries out of `size`, and `error`
    is the largest standard error of any bin's share.
    """

    step: int
    parameter: str | None
    low: int
    negative: tuple[float, ...]
    positive: tuple[float, ...]
    zero: float
    nan: float
    inf: float
    underflow: float
    size: int
    sampled: int
    source: str = "watch"
    """Who counted `step`: "watch", which counts the optimizer's, or "tracker", its own."""

    @property
    def error(self) -> float:
        """The largest standard error of a bin's share; 0 where every entry was counted."""
        if self.sampled >= self.size:
            return 0.0
        # sqrt(p * (1 - p) / n) of a share p is largest where p is a half.
        return 0.5 / math.sqrt(self.sampled)

    def bins(self) -> tuple[list[float], list[float]]:
        """Counts and ascending edges of the finite entries; zeros and underflow are around 0.

        >>> counts = dict(negative=(3,), positive=(4,), zero=2, nan=0, inf=0, underflow=0)
        >>> Histogram(0, None, -1, **counts, size=9, sampled=9).bins()
        ([3, 2, 4], [-1.0, -0.5, 0.5, 1.0])
        """
        # Powers of two: no pass over the gradients has to find their range first.
        exponents = range(self.low, self.low + len(self.positive) + 1)
        magnitudes = [2.0**exponent for exponent in exponents]
        edges = [-edge for edge in reversed(magnitudes)] + magnitudes
        return [*reversed(self.negative), self.zero + self.underflow, *self.positive], edges

    def linear(self, bins: int = 101, covered: float = 0.99) -> tuple[list[float], list[float]]:
        """Counts and edges of equally wide bins centred on 0, for trackers that draw no others.

        The range is the smallest power of two that covers this share of the entries that are not
        zero; the few beyond it are in no bin: `outside` counts them. Within a power of two the
        entries are spread evenly.
        """
        reach = self._reach(covered)
        width = 2 * reach / bins
        edges = [-reach + width * index for index in range(bins)] + [reach]
        counts = [0.0] * bins
        counts[bins // 2] += self.zero + self.underflow
        for sign, tallies in ((-1, self.negative), (1, self.positive)):
            for index, tally in enumerate(tallies):
                start = 2.0 ** (self.low + index)
                # Put into the outermost bins, the tail would stand there like a pair of horns.
                if start < reach:
                    _spread(counts, width, sign, start, tally)
        return counts, edges

    def outside(self, covered: float = 0.99) -> tuple[float, float]:
        """How many finite entries lie below and above the range of `linear`.

        >>> counts = dict(negative=(60, 0), positive=(59, 1), zero=0, nan=0, inf=0, underflow=0)
        >>> Histogram(0, None, -1, **counts, size=120, sampled=120).outside()
        (0, 1)
        """
        reach = self._reach(covered)
        beyond = [2.0 ** (self.low + index) >= reach for index in range(len(self.positive))]
        below = sum(tally for tally, is_out in zip(self.negative, beyond, strict=True) if is_out)
        above = sum(tally for tally, is_out in zip(self.positive, beyond, strict=True) if is_out)
        return below, above

    @property
    def outside_share(self) -> float:
        """The share of finite entries that lie outside the range of `linear`."""
        finite = sum(self.negative) + sum(self.positive) + self.zero + self.underflow
        return sum(self.outside()) / max(1.0, finite)

    def _reach(self, covered: float) -> float:
        """The smallest power of two whose range around 0 holds this share of the finite entries."""
        total = sum(self.negative) + sum(self.positive)
        inside = 0.0
        for index, tally in enumerate(map(sum, zip(self.negative, self.positive, strict=True))):
            inside += tally
            if inside >= covered * total:
                return 2.0 ** (self.low + index + 1)
        return 1.0


def _spread(counts: list[float], width: float, sign: int, start: float, tally: float) -> None:
    """Add entries spread evenly over sign * [start, 2 * start) to bins of one width around 0."""
    middle = len(counts) // 2
    outermost = len(counts) - 1
    # In bins, from the left edge of the middle one.
    low = start / width + 0.5
    high = 2 * start / width + 0.5
    for offset in range(int(low), int(high) + 1):
        share = max(0.0, min(high, offset + 1) - max(low, offset)) / (high - low)
        # Rounding may lead a hair's breadth beyond the outermost.
        counts[min(max(middle + sign * offset, 0), outermost)] += tally * share
