"""Compares what the ranks of DistributedDataParallel bring to the common gradient, before it is
reduced.

A few parameters are looked at on every step, all of them at closer looks. The norms are gathered on
our own group, and nobody waits for that: what has arrived is handed on at a later step.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor, nn

from gradsight.core.group import PendingArrays, ProcessGroup
from gradsight.core.sharing import replicated_parameters
from gradsight.health.window import RankLook
from gradsight.measure.local import LocalLook, LocalNorms
from gradsight.measure.local_hooks import LocalGradients

_SENTINELS = 4
_LEAST_ENTRIES = 4
_PENDING = 64
"""Steps under way from which on the other ranks are taken to be gone."""


class Ranks:
    """What this rank's own gradients are like, exchanged with the other ranks."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        group: ProcessGroup,
        closer: Callable[[int], bool],
        report: Callable[[str, str], None],
    ) -> None:
        self._size, self._group, self._closer, self._report = len(parameters), group, closer, report
        replicated = replicated_parameters(model)
        self._all = [
            row
            for row, tensor in enumerate(parameters)
            if id(tensor) in replicated and tensor.requires_grad
        ]
        self._few = sentinels(self._all, [tensor.numel() for tensor in parameters])
        self._rows: list[int] = []
        self._norms = LocalNorms()
        self._hooks = LocalGradients(parameters, self._norms.see, self._failed)
        self._leaving: deque[tuple[int, list[int], LocalLook]] = deque()
        self._pending: deque[PendingArrays] = deque()
        self._works = bool(self._all)

    def begin(self, step: int) -> None:
        """Look at this step."""
        if self._works:
            self._rows = self._all if self._closer(step) else self._few
            self._hooks.watch(self._rows)

    def end_step(self, step: int) -> list[RankLook]:
        """The step is made: send what was seen, and give what has come from all ranks meanwhile."""
        if not self._works:
            return []
        try:
            self._leaving.append((step, self._rows, self._norms.take()))
            self.begin(step + 1)
            self._send()
            if len(self._pending) > _PENDING:
                raise TimeoutError("the other ranks do not answer")
            return self._landed()
        except Exception as error:
            self._failed(error)
            return []

    def stop(self, patience: float) -> list[RankLook]:
        """Take the hooks away; give what still arrives within so many seconds, and nothing without
        any patience.
        """
        self._hooks.watch(())
        if not patience:
            self._works = False
        until = time.monotonic() + patience
        while (
            self._works
            and self._pending
            and not self._pending[-1].done()
            and time.monotonic() < until
        ):
            time.sleep(0.001)
        try:
            return self._landed() if self._works else []
        except Exception as error:
            self._failed(error)
            return []
        finally:
            self._works = False

    def _send(self) -> None:
        while self._leaving and self._leaving[0][2].ready():
            step, rows, look = self._leaving.popleft()
            self._pending.append(
                self._group.start_gather(np.append(look.read(self._size, rows), step))
            )

    def _landed(self) -> list[RankLook]:
        found = []
        while self._pending and self._pending[0].done():
            table = np.stack(self._pending.popleft().wait())
            rows = np.flatnonzero(
                (table[:, :-1] >= 0).all(axis=0) | np.isnan(table[:, :-1]).any(axis=0)
            )
            if (table[:, -1] == table[0, -1]).all():
                few = np.isin(rows, self._few)
                found.append(RankLook(int(table[0, -1]), rows, table[:, rows], few))
        return found

    def _failed(self, error: Exception) -> None:
        """Training goes on; ranks are not compared any more."""
        if self._works:
            self._works = False
            self._hooks.watch(())
            self._report(
                "ranks", f"ranks are not compared any more: {type(error).__name__}: {error}"
            )


def sentinels(rows: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """A few small parameters spread over the model: what goes wrong above them in backward reaches
    them.

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
