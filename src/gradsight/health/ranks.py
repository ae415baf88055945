"""Compares what the ranks of DistributedDataParallel bring to the common gradient, before it is
reduced.

A few parameters are looked at on every step, all of them at closer looks. The norms are gathered on
our own group, and nobody waits for that: what has arrived is handed on at a later step.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from gradsight.core.group import PendingArrays, ProcessGroup
from gradsight.core.guard import Guard
from gradsight.core.problems import Problems
from gradsight.core.sharing import replicated_parameters
from gradsight.measure.local import LocalNorms, LocalReading
from gradsight.values.measured import RankComparison
from gradsight.values.steps import CloserLooks

_SENTINELS = 4
_LEAST_ENTRIES = 4
_PENDING = 64
"""Steps under way from which on the other ranks are taken to be gone."""


class RankComparer:
    """What this rank's own gradients are like, exchanged with the other ranks.

    To be made on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        group: ProcessGroup,
        closer_looks: CloserLooks,
        problems: Problems,
    ) -> None:
        self._size = len(parameters)
        self._group = group
        self._closer_looks = closer_looks
        self._guard = Guard(problems, "ranks", "ranks are not compared any more")
        replicated = replicated_parameters(model)
        self._all = [
            row
            for row, tensor in enumerate(parameters)
            if id(tensor) in replicated and tensor.requires_grad
        ]
        self._few = sentinels(self._all, [tensor.numel() for tensor in parameters])
        self._rows: list[int] = []
        self._norms = LocalNorms(parameters, self._guard)
        self._leaving: deque[tuple[int, list[int], LocalReading]] = deque()
        self._pending: deque[PendingArrays] = deque()
        self._works = bool(self._all)
        self._look_at(closer_looks.first_step)

    def end_step(self, step: int) -> list[RankComparison]:
        """The step is made: send what was seen; what has come from all ranks meanwhile."""
        if not self._works:
            return []
        landed: list[RankComparison] = self._guard.run(self._exchange, step) or []
        return landed

    def _exchange(self, step: int) -> list[RankComparison]:
        # Gathered without waiting: ranks may be steps apart, and training must not feel it.
        self._leaving.append((step, self._rows, self._norms.take()))
        self._look_at(step + 1)
        self._send()
        # gloo would say so only after its time limit; till then each step holds a message.
        if len(self._pending) > _PENDING:
            raise TimeoutError("the other ranks do not answer")
        return self._landed()

    def stop(self, patience: float) -> list[RankComparison]:
        """Take the hooks away; what still arrives within so many seconds, nothing without any."""
        self._norms.watch(())
        if not patience or self._guard.faults:
            self._works = False
        until = time.monotonic() + patience
        while self._works and self._pending and time.monotonic() < until:
            if self._pending[-1].done():
                break
            time.sleep(0.001)
        landed: list[RankComparison] = []
        if self._works:
            landed = self._guard.run(self._landed) or []
        self._works = False
        return landed

    def _look_at(self, step: int) -> None:
        if self._works:
            self._rows = self._all if self._closer_looks.due(step) else self._few
            self._norms.watch(self._rows)

    def _send(self) -> None:
        while self._leaving and self._leaving[0][2].ready():
            step, rows, look = self._leaving.popleft()
            self._pending.append(
                self._group.start_gather(np.append(look.read(self._size, rows), step))
            )

    def _landed(self) -> list[RankComparison]:
        comparisons = []
        while self._pending and self._pending[0].done():
            table = np.stack(self._pending.popleft().wait())
            rows = np.flatnonzero(
                (table[:, :-1] >= 0).all(axis=0) | np.isnan(table[:, :-1]).any(axis=0)
            )
            # The step travels along: ranks that have lost count of it cannot be compared.
            if (table[:, -1] == table[0, -1]).all():
                few = np.isin(rows, self._few)
                comparisons.append(RankComparison(int(table[0, -1]), rows, table[:, rows], few))
        return comparisons


def sentinels(rows: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """A few small parameters spread over the model.

    What goes wrong above them in backward reaches them.

    >>> sentinels([0, 1, 2, 3, 4, 5, 6, 7], [64, 8, 64, 8, 64, 8, 64, 8])
    [1, 3, 5, 7]
    """
    parts = [
        part.tolist()
        for part in np.array_split(np.array(rows, dtype=int), min(_SENTINELS, max(1, len(rows))))
    ]
    return [
        min(part, key=lambda row: (sizes[row] < _LEAST_ENTRIES, sizes[row]))
        for part in parts
        if part
    ]
