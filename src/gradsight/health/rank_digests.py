"""Compares what ranks hold at three fixed steps, through the store of training's process group.

Each rank writes a few checksums and reads those of the others when they are there. That is no
collective: nobody waits, and a script may train on some of its ranks only. Largest and smallest
entries are exact on every machine, so equal tensors have equal checksums.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from gradsight.core.group import ProcessGroup, rank, world_size
from gradsight.core.guard import Guard
from gradsight.core.problems import Problems
from gradsight.measure.host_copy import HostCopy
from gradsight.measure.norms import NormReading
from gradsight.values.measured import RankDigests

STEPS = (0, 2, 8)
"""The compared steps, counted from the first one of the watch."""
_POLLS = 40
"""How often rank 0 asks for the others' checksums of a step, before it leaves that to the end."""

_opened = 0


@dataclass(slots=True)
class _Step:
    """One compared step of this rank."""

    number: int
    gradients: Sequence[NormReading]
    weights: NormReading
    batch: Sequence[HostCopy]
    is_sent: bool = False
    polls: int = 0

    def ready(self) -> bool:
        parts: tuple[NormReading | HostCopy, ...] = (*self.gradients, self.weights, *self.batch)
        return all(part.ready() for part in parts)


class RankDigestExchange:
    """Sends this rank's checksums; on rank 0, also tells how they compare with the others'."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup,
        parallel: Literal["data", "other"] | None,
        first_step: int,
        problems: Problems,
    ) -> None:
        """`parallel`: how the ranks share the model, as far as that is known."""
        global _opened
        self._tensors = [tensor for tensor in tensors if tensor.requires_grad]
        self._parallel = parallel
        self._first_step = first_step
        self._is_first = group.is_first
        self._guard = Guard(problems, "rank-digests", "ranks are not compared")
        self._steps: list[_Step] = []
        # Ranks open their watches in the same order, so that the number is the same on all.
        _opened += 1
        self._prefix = f"gradsight/digests/{_opened}"
        self._start: NormReading | None = self._read(self._tensors)
        self._store: Any = self._guard.run(_default_store)

    def _read(self, tensors: Sequence[Tensor]) -> NormReading | None:
        reading: NormReading | None = self._guard.run(
            lambda: NormReading([tensor.detach() for tensor in tensors])
        )
        return reading

    def wants(self, step: int) -> bool:
        """Whether ranks are compared at this step."""
        return self._store is not None and step - self._first_step in STEPS

    def end_step(
        self, step: int, gradients: Sequence[NormReading], batch: Sequence[HostCopy]
    ) -> list[RankDigests]:
        """The step is made: what has come from the other ranks by now, on rank 0.

        gradients: what the optimizers used. batch: samples of what the model was called with.
        """
        if self._store is None:
            return []
        if self.wants(step):
            weights = self._read(self._tensors)
            if weights is not None:
                self._steps.append(_Step(step, gradients, weights, batch))
        if not self._steps:
            return []
        landed: list[RankDigests] = self._guard.run(self._exchange, False) or []
        return landed

    def finish(self) -> list[RankDigests]:
        """The run is over: what is there by now."""
        if self._store is None or not self._steps:
            return []
        landed: list[RankDigests] = self._guard.run(self._exchange, True) or []
        return landed

    def _exchange(self, at_end: bool) -> list[RankDigests]:
        landed = []
        for each in tuple(self._steps):
            if not each.is_sent and (at_end or each.ready()):
                each.is_sent = True
                self._store.set(self._key(each.number, rank()), json.dumps(self._digests(each)))
            if each.is_sent and not self._is_first:
                self._steps.remove(each)
            elif each.is_sent and (at_end or each.polls < _POLLS):
                each.polls += 1
                keys = [self._key(each.number, other) for other in range(world_size())]
                if self._store.check(keys):
                    self._steps.remove(each)
                    landed.append(self._compared(each.number, keys))
        return landed

    def _key(self, step: int, of_rank: int) -> str:
        return f"{self._prefix}/{step}/{of_rank}"

    def _digests(self, step: _Step) -> list[int | None]:
        """Checksums of the weights at the start, the gradient, the weights now, and the batch."""
        batch = [copy.read() for copy in step.batch]
        # Batches of a single value, such as zeros, tell nothing.
        is_varied = any((values != values.flat[0]).any() for values in batch)
        return [
            None if self._start is None else _digest([self._start]),
            _digest(step.gradients) if step.gradients else None,
            _digest([step.weights]),
            _checksum(batch) if is_varied else None,
        ]

    def _compared(self, step: int, keys: Sequence[str]) -> RankDigests:
        table = [json.loads(self._store.get(key)) for key in keys]
        columns = zip(*table, strict=True)
        start, gradient, weights, batch = (
            None if None in column else len(set(column)) == 1 for column in columns
        )
        return RankDigests(step, len(keys), self._parallel, start, gradient, weights, batch)


def _digest(readings: Sequence[NormReading]) -> int:
    for reading in readings:
        if not reading.pieces:
            reading.read()
    return _checksum([values[:, 1:] for reading in readings for _, values in reading.pieces])


def _checksum(arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array, dtype=np.float64).tobytes(), total)
    return total


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
