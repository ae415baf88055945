"""Which experts of a group got a gradient at the last looks, and how much of it."""

from collections import deque

import numpy as np

from gradsight.values.measured import Flags, Floats

_KEPT = 16
_ABSENT = 4
"""Looks in a row without a gradient after which an expert is not counted among the living."""


class ExpertLife:
    """The last looks at experts that stand side by side."""

    def __init__(self) -> None:
        self._looks: deque[tuple[int, Floats]] = deque(maxlen=_KEPT)

    def take(self, step: int, norms: Floats) -> None:
        """A look: the norm of each expert's gradient."""
        # A step that left the whole group out, or broke, says nothing of a single expert.
        if np.isfinite(norms).all() and norms.any():
            self._looks.append((step, norms))

    @property
    def looks(self) -> int:
        """How many looks are remembered."""
        return len(self._looks)

    @property
    def steps(self) -> list[int]:
        """The steps of these looks."""
        return [step for step, _ in self._looks]

    @property
    def _norms(self) -> Floats:
        return np.stack([norms for _, norms in self._looks])

    def absences(self) -> list[int]:
        """By expert: for how many looks in a row, up to the last, it has had no gradient."""
        backwards = self._norms[::-1] > 0
        return np.where(backwards.any(axis=0), backwards.argmax(axis=0), len(backwards)).tolist()

    def presence(self) -> Floats:
        """By expert: the share of the looks at which it had a gradient."""
        shares: Floats = (self._norms > 0).mean(axis=0)
        return shares

    def shares(self) -> Floats:
        """By expert: the square of its norm over the mean square of all, averaged over looks."""
        squares = (self._norms / self._norms.max(axis=1, keepdims=True)) ** 2
        shares: Floats = (squares / squares.mean(axis=1, keepdims=True)).mean(axis=0)
        return shares

    def dead(self, steps: int, chance: float) -> Flags:
        """By expert: whether it has had none for so long that chance does not explain it.

        steps: for how many at least; chance: that balanced routing leaves any expert out so often,
        where each comes as seldom as the one that comes least of those that still come.
        """
        absences = np.array(self.absences())
        living = absences < min(_ABSENT, self.looks)
        if self.looks < _ABSENT or not living.any():
            return np.zeros(len(absences), dtype=bool)
        comes = (self.presence()[living] * self.looks + 0.5) / (self.looks + 1)
        stays_away = 1 - float(comes.min())
        passed = np.array([self.steps[-1] - self.steps[-run] if run else 0 for run in absences])
        by_chance = len(absences) * stays_away**absences
        return ~living & (passed >= steps) & (by_chance < chance)
