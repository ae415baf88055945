"""Compares what ranks hold at three fixed steps, through the store of training's process group.

Each rank writes a few checksums and reads those of the others when they are there. That is no
collective: nobody waits, and a script may train on some of its ranks only. Largest and smallest
entries are exact on every machine, so equal tensors have equal checksums.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from gradsight.core import moments
from gradsight.core.group import ProcessGroup
from gradsight.core.guard import Guard
from gradsight.core.meeting import MeetingPlace
from gradsight.core.problems import Problems
from gradsight.core.shards import local_part
from gradsight.core.sharing import Kind
from gradsight.measure.host_copy import HostCopy
from gradsight.measure.norms import NormReading
from gradsight.values.measured import RankDigests

STEPS = (0, 2, 8)
"""The compared steps, counted from the first one of the watch."""
_POLLS = 40
"""How often rank 0 asks for the others' checksums of a step, before it leaves that to the end."""


@dataclass(slots=True)
class _Step:
    """One compared step of this rank."""

    number: int
    gradients: Sequence[HostCopy]
    batch: Sequence[HostCopy]
    parallel: Kind | None
    weights: Sequence[HostCopy] | None = None
    is_sent: bool = False
    polls: int = 0

    def ready(self) -> bool:
        if self.weights is None:
            return False
        return all(part.ready() for part in (*self.gradients, *self.weights, *self.batch))


class RankDigestExchange:
    """Sends this rank's checksums; on rank 0, also tells how they compare with the others'."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup,
        sharing: Callable[[], Kind | None],
        first_step: int,
        problems: Problems,
    ) -> None:
        """`sharing`: tells how the ranks share the model now, as far as that is known."""
        self._tensors = [tensor for tensor in tensors if tensor.requires_grad]
        self._sharing = sharing
        self._first_step = first_step
        self._is_first = group.is_first
        self._listens = False
        self._guard = Guard(problems, "rank-digests", "ranks are not compared")
        self._steps: list[_Step] = []
        self._start: Sequence[HostCopy] = self._guard.run(extremes, self._tensors) or ()
        self._place: MeetingPlace | None = self._guard.run(MeetingPlace, "digests")

    def wants(self, step: int) -> bool:
        """Whether ranks are compared at this step."""
        return self._place is not None and step - self._first_step in STEPS

    def end_step(
        self, step: int, gradients: Sequence[HostCopy], batch: Sequence[HostCopy]
    ) -> list[RankDigests]:
        """The step is made: what has come from the other ranks by now, on rank 0.

        gradients: the extremes of what the optimizers used.
        batch: samples of what the model was called with.
        """
        if self._place is None:
            return []
        self._guard.run(self._read_weights)
        if self._listens:
            self._listens = False
            moments.leave(self)
        if self.wants(step):
            self._steps.append(_Step(step, gradients, batch, self._sharing()))
            self._listens = True
            moments.listen(self, self._guard, own_thread=True)
        if not self._steps:
            return []
        landed: list[RankDigests] = self._guard.run(self._exchange, False) or []
        return landed

    def before_backward(self, _: object) -> None:
        """Read the weights before a backward pass, when the previous update is complete."""
        self._read_weights()

    def _read_weights(self) -> None:
        # The end of the inner step is too early: ZeroRedundancyOptimizer sends the updated weights
        # to the other ranks only afterwards.
        for each in self._steps:
            if each.weights is None:
                each.weights = extremes(self._tensors)

    def finish(self) -> list[RankDigests]:
        """The run is over: what is there by now."""
        if self._place is None or not self._steps:
            return []
        self._guard.run(self._read_weights)
        moments.leave(self)
        landed: list[RankDigests] = self._guard.run(self._exchange, True) or []
        return landed

    def _exchange(self, at_end: bool) -> list[RankDigests]:
        landed: list[RankDigests] = []
        place = self._place
        if place is None:
            return landed
        for each in tuple(self._steps):
            if not each.is_sent and (at_end or each.ready()):
                each.is_sent = True
                place.leave_note(str(each.number), json.dumps(self._digests(each)))
            if each.is_sent and not self._is_first:
                self._steps.remove(each)
            elif each.is_sent and (at_end or each.polls < _POLLS):
                each.polls += 1
                notes = place.notes(str(each.number))
                if notes is not None:
                    self._steps.remove(each)
                    landed.append(self._compared(each, notes))
        return landed

    def _digests(self, step: _Step) -> list[int | None]:
        """Checksums of the weights at the start, the gradient, the weights now, and the batch."""
        batch = [copy.read() for copy in step.batch]
        # Batches of a single value, such as zeros, tell nothing.
        is_varied = any((values != values.flat[0]).any() for values in batch)
        parts = (self._start, step.gradients, step.weights or (), step.batch if is_varied else ())
        return [_checksum([copy.read() for copy in part]) if part else None for part in parts]

    def _compared(self, step: _Step, notes: Sequence[str]) -> RankDigests:
        columns = zip(*map(json.loads, notes), strict=True)
        start, gradient, weights, batch = (
            None if None in column else len(set(column)) == 1 for column in columns
        )
        return RankDigests(step.number, len(notes), step.parallel, start, gradient, weights, batch)


def extremes(tensors: Sequence[Tensor]) -> list[HostCopy]:
    """The largest and smallest entries of tensors, on their way to the host."""
    reading = NormReading([local_part(tensor.detach()) for tensor in tensors])
    return [HostCopy.of(each) for each in reading.extremes()]


def _checksum(arrays: Sequence[np.ndarray[Any, Any]]) -> int:
    total = 0
    for array in arrays:
        # Make all zeros and all NaNs equal, because their bits may differ.
        numbers = np.where(np.isnan(array), np.nan, array.astype(np.float64) + 0.0)
        total = zlib.crc32(np.ascontiguousarray(numbers).tobytes(), total)
    return total
