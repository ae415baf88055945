"""A closer look at experts: what this rank sees of them, and what all ranks together say."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradsight.core.shards import is_sharded, place_of
from gradsight.measure.experts import ExpertReading, norms_of_members
from gradsight.session.readings import StepInProgress
from gradsight.values.experts import ExpertGroup
from gradsight.values.measured import Floats, Norms


class ExpertLooks:
    """Norms by expert as one row of numbers, which adds up over ranks.

    Of each tensor [E, ...]: the squared norm of every expert, and whether there was a gradient.
    """

    def __init__(
        self, groups: Sequence[ExpertGroup], parameters: Sequence[Tensor], left_out: Sequence[bool]
    ) -> None:
        """`left_out`: the parameters of which another rank's part is counted."""
        self._groups = groups
        self._parameters = parameters
        self._left_out = left_out
        self._starts: dict[int, int] = {}
        self.width = 0
        """How many numbers there are."""
        for group in groups:
            if group.row is not None:
                self._starts[group.row] = self.width
                self.width += group.size + 1

    def look(self, rows: Sequence[int], gradients: Sequence[Tensor]) -> ExpertReading | None:
        """Start measuring those of these gradients that have experts; None without any."""
        if not self._starts:
            return None
        found = {
            row: gradient
            for row, gradient in zip(rows, gradients, strict=True)
            if row in self._starts and self._has_whole_slices(row, gradient)
        }
        return ExpertReading.of(found) if found else None

    def _has_whole_slices(self, row: int, gradient: Tensor) -> bool:
        """Whether it can be told which experts this part of a gradient is of."""
        parameter = self._parameters[row]
        if gradient.dim() != parameter.dim() or gradient.shape[0] == 0:
            return False
        if not is_sharded(parameter):
            return True
        # A strided shard (two axes of a mesh over one of the tensor) is no run of slices.
        kinds = {type(each).__name__ for each in parameter.placements}  # type: ignore[attr-defined]
        return kinds <= {"Shard", "Replicate"}

    def sums(self, made: StepInProgress) -> Floats:
        """What this rank saw at a step."""
        result = np.zeros(self.width)
        for used in made.used:
            reading = used.reading.experts
            if reading is None:
                continue
            factor = used.reading.factor() if used.scaled else 1.0
            for row, norms in reading.read().items():
                if row not in used.rows or self._is_left_out(row):
                    continue
                start = self._starts[row] + self._first_expert(row)
                result[start : start + len(norms)] = (norms / factor) ** 2
                result[self._starts[row] + self._size(row)] = 1.0
        return result

    def norms(self, sums: Floats, rows: Sequence[int], norms: Norms) -> dict[str, Floats]:
        """By group the norm of each expert; groups without any gradient are missing.

        sums: of all ranks; `norms` are of the parameters in `rows`.
        """
        if not self._groups:
            return {}
        l2 = np.full(len(self._parameters), np.nan)
        l2[list(rows)] = norms.l2
        found = {}
        for group in self._groups:
            if group.row is None:
                if not np.isnan(l2[list(group.rows)]).all():
                    found[group.name] = norms_of_members(l2, group.members)
            else:
                start = self._starts[group.row]
                if sums[start + group.size]:
                    found[group.name] = np.sqrt(sums[start : start + group.size])
        return found

    def _size(self, row: int) -> int:
        return int(self._parameters[row].shape[0])

    def _first_expert(self, row: int) -> int:
        return place_of(self._parameters[row], 0).offsets[0]

    def _is_left_out(self, row: int) -> bool:
        return bool(self._left_out) and self._left_out[row]
