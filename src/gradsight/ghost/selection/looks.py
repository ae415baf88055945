"""What is known of rows, or of domains, from the looks at their scores. No torch."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DOUBT = 1.0
"""Looks that a new entry is taken to have had already, neither helping nor hurting: one score of
one sample is mostly noise."""
SHARPNESS = 2.0
"""How much more often than a neutral entry one is wanted that always helps: e to this power."""


def comparable(scores: Floats) -> Floats:
    """The scores of one look between -1 and 1, by their typical size in it; the signs stay.

    Raw scores shrink as training goes on. The typical size is the middle one, so that one score
    that is far out does not make all others look like nothing; far out itself it counts as 1.

    >>> comparable(np.array([3e-6, -1e-6, 1e-6, 5.0])).round(2).tolist()
    [0.76, -0.32, 0.32, 1.0]
    """
    sizes = np.sort(np.abs(scores[scores != 0]))
    if not len(sizes):
        return np.zeros_like(scores)
    # Not numpy's median: the sum of two huge scores would overflow.
    typical = sizes[len(sizes) // 2]
    with np.errstate(over="ignore"):
        bounded: Floats = np.tanh(scores / typical)
    return bounded


class InfluenceLooks:
    """A running mean per entry of its comparable scores, in which older looks count for less."""

    def __init__(self, entries: int, decay: float) -> None:
        self.decay = decay
        """What stays of the old value at a look."""
        self.sums = np.zeros(entries)
        """Of each entry's looks, the older ones decayed."""
        self.counts = np.zeros(entries)
        """How many looks that are, decayed alike."""

    def add(self, entries: Ints, scores: Floats) -> Ints:
        """One look at some entries; the mean where one occurs often. Returns the entries seen.

        Scores that are not finite are no look.
        """
        finite = np.isfinite(scores)
        entries = entries[finite]
        values = comparable(_means(entries, scores[finite]))
        seen = np.unique(entries)
        self.sums[seen] = self.decay * self.sums[seen] + values
        self.counts[seen] = self.decay * self.counts[seen] + 1.0
        return seen

    def appeal(self, entries: Ints | slice) -> Floats:
        """How much more often than a neutral entry each is wanted: 1 before any look."""
        means = self.sums[entries] / (self.counts[entries] + DOUBT)
        wanted: Floats = np.exp(SHARPNESS * means)
        return wanted


def _means(entries: Ints, scores: Floats) -> Floats:
    """The mean score of every entry that occurs, in the order of the entries."""
    _, place, counts = np.unique(entries, return_inverse=True, return_counts=True)
    # Divided before they are added: the sum of two huge scores would overflow.
    means: Floats = np.zeros(len(counts))
    np.add.at(means, place, scores / counts[place])
    return means
