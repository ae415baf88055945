"""A row for every place of an order, drawn by weight. No torch."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NUMBERS = 1024
"""Random numbers that are made together."""
_CHUNK = 1024
"""Rows whose sum is kept: whoever changes a few weights of millions adds up a few chunks."""


class Chances:
    """One random number from 0 to 1 per place of an epoch, which follows from seed and place alone.

    So a rank needs to know nothing of the draws of others, and a resumed run nothing of earlier
    ones. No generator of torch's or of numpy's own is touched.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._known: tuple[int, int] | None = None
        self._numbers: Floats = np.zeros(0)

    def at(self, epoch: int, place: int) -> float:
        """The number of a place."""
        part, index = divmod(place, _NUMBERS)
        if self._known != (epoch, part):
            self._numbers = np.random.default_rng([self.seed, epoch, part]).random(_NUMBERS)
            self._known = (epoch, part)
        return float(self._numbers[index])


class AppealTable:
    """A positive number per row: draws rows in proportion to it, and takes changes of a few."""

    def __init__(self, rows: int) -> None:
        chunks = -(-rows // _CHUNK)
        self._rows = rows
        self._numbers = np.zeros((chunks, _CHUNK))
        self._sums = np.zeros(chunks)
        self._ends: Floats | None = None
        self.set(np.arange(rows), np.ones(rows))

    def set(self, rows: Ints, numbers: Floats) -> None:
        """Give rows new numbers."""
        self._numbers.reshape(-1)[rows] = numbers
        changed = np.unique(rows // _CHUNK)
        # Added up anew, not corrected: what stands here must not depend on the way it came about.
        self._sums[changed] = self._numbers[changed].sum(axis=1)
        self._ends = None

    @property
    def all(self) -> Floats:
        """The number of every row."""
        return self._numbers.reshape(-1)[: self._rows]

    @property
    def mean(self) -> float:
        """Over all rows."""
        return float(self._cumulated()[-1]) / self._rows

    def row_at(self, chance: float) -> int:
        """The row that a random number from 0 to 1 stands for."""
        ends = self._cumulated()
        wanted = chance * float(ends[-1])
        chunk = _first_beyond(ends, wanted)
        if chunk:
            wanted -= float(ends[chunk - 1])
        inside = np.cumsum(self._numbers[chunk])
        # Rounding may carry the number past a chunk's last row, behind which there is nothing.
        return min(chunk * _CHUNK + _first_beyond(inside, wanted), self._rows - 1)

    def _cumulated(self) -> Floats:
        if self._ends is None:
            self._ends = np.cumsum(self._sums)
        return self._ends


def _first_beyond(ends: Floats, wanted: float) -> int:
    """The first of growing numbers that is above the wanted one; the last, if none is."""
    return min(int(np.searchsorted(ends, wanted, side="right")), len(ends) - 1)


def spread_over(chance: float, count: int) -> int:
    """One of `count` equally likely numbers."""
    return min(int(chance * count), count - 1)
