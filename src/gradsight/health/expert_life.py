"""Which experts of a group got a gradient lately, and how much of it."""

from collections import deque

import numpy as np

from gradsight.values.measured import Flags, Floats

_KEPT = 64
_FEWEST = 4
"""Steps that an expert has to be missed at before anything is said of it."""
_UNEVEN = 3
"""How many times less often than the least of the living an expert may come, and be well."""


class ExpertLife:
    """The last steps of experts that stand side by side, as far as they were looked at."""

    def __init__(self) -> None:
        self._looks: deque[tuple[int, Floats]] = deque(maxlen=_KEPT)

    def take(self, step: int, norms: Floats) -> None:
        """A step: the norm of each expert's gradient."""
        # A step that left the whole group out, or broke, says nothing of a single expert.
        if np.isfinite(norms).all() and norms.any():
            self._looks.append((step, norms))

    @property
    def looks(self) -> int:
        """How many steps are remembered."""
        return len(self._looks)

    @property
    def steps(self) -> list[int]:
        """Which these are."""
        return [step for step, _ in self._looks]

    @property
    def _norms(self) -> Floats:
        return np.stack([norms for _, norms in self._looks])

    def absences(self) -> list[int]:
        """By expert: at how many steps in a row, up to the last, it has had no gradient."""
        backwards = self._norms[::-1] > 0
        runs = np.where(backwards.any(axis=0), backwards.argmax(axis=0), len(backwards))
        return [int(run) for run in runs]

    def presence(self) -> Floats:
        """By expert: the fraction of the steps at which it had a gradient."""
        fractions: Floats = (self._norms > 0).mean(axis=0)
        return fractions

    def ratios(self) -> Floats:
        """By expert: the square of its norm over the mean square of all, averaged over steps."""
        squares = (self._norms / self._norms.max(axis=1, keepdims=True)) ** 2
        ratios: Floats = (squares / squares.mean(axis=1, keepdims=True)).mean(axis=0)
        return ratios

    def dead(self, steps: int, chance: float) -> Flags:
        """By expert: whether it has had none for so long that chance does not explain it.

        steps: for how many at least; chance: that any of them is left out so often, where each
        comes `_UNEVEN` times less often than the one that comes least of those that still come.
        """
        if self.looks < _FEWEST:
            return np.zeros(0, dtype=bool)
        absences = np.array(self.absences())
        known = self.steps
        missed = np.array([known[-1] - known[-run] + 1 if run else 0 for run in absences])
        is_gone: Flags = (absences >= _FEWEST) & (missed >= steps)
        if is_gone.all() or not is_gone.any():
            return np.zeros(len(absences), dtype=bool)
        comes = (self.presence()[~is_gone] * self.looks + 0.5) / (self.looks + 1)
        stays_away = 1 - float(comes.min())
        by_chance = len(absences) * stays_away ** (absences / _UNEVEN)
        return is_gone & (by_chance < chance)
