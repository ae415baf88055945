"""The processes that train together, and a process group of our own among them.

Everything here also works in one plain process, where every exchange is with itself.
"""

import atexit
import contextlib
import ctypes
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from gradsight.core import meeting
from gradsight.core.guard import Guard
from gradsight.core.meeting import Meeting, MeetingPlace, RanksMissing
from gradsight.core.problems import Problems
from gradsight.errors import GradsightError

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=10)
_CREATION = timedelta(minutes=1)
"""How long making a group may take, once all ranks have met for it."""
_EXIT_PATIENCE = 3.0
"""Seconds that work under way gets to arrive when the interpreter ends."""
_LAST_WORD = 2.0
"""Seconds that an exchange gets after a rank has left: it may have taken part before."""
_BETWEEN_QUESTIONS = 0.25
"""Seconds between two questions whether a rank has left; the store is another process's."""


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank; 0 where there is only one."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if is_distributed() else 1


def launched_rank() -> int:
    """Return the rank that torchrun or another launcher set for this process; 0 without one."""
    return _number_in_environment("RANK")


def processes_apart() -> int:
    """Return how many processes were launched together without a process group; else 0."""
    if is_distributed() or "RANK" not in os.environ:
        return 0
    launched = _number_in_environment("WORLD_SIZE")
    return launched if launched > 1 else 0


def _number_in_environment(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def join_training(backend: str) -> None:
    """Become one of the processes that torchrun, or our own launcher, has started."""
    dist.init_process_group(backend)


def leave_training() -> None:
    """Leave them again."""
    if is_distributed():
        dist.destroy_process_group()


class PendingArrays:
    """Arrays on their way between the ranks."""

    def __init__(
        self, work: Any, mine: Tensor, parts: list[Tensor], place: MeetingPlace | None = None
    ) -> None:
        """`place`: where a rank would tell that it has left."""
        self._work = work
        self._mine = mine
        self._parts = parts
        self._place = place

    def done(self) -> bool:
        """Whether `wait` would not wait."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> list[npt.NDArray[np.float64]]:
        """Every rank's array, in the order of ranks; of a sum, the sum alone."""
        if self._work is not None:
            _wait_unless_left(self._work, self._place)
        return [part.numpy() for part in self._parts]

    def leak(self) -> None:
        """Keep the tensors for good, also beyond the end of the interpreter."""
        # In torch as well: where Python alone is left to hold a tensor, whoever lets go of it has
        # to tell Python, and needs the interpreter's lock for it.
        kept: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        kept.set_result([self._mine, *self._parts])
        _leak(kept)
        _leak(self._work)


class ProcessGroup:
    """All processes, in a group of our own, so that nothing of ours runs on training's.

    To be made on every rank at the same point, and to be used in the same order on all of them.
    """

    def __init__(
        self,
        purpose: str = "group",
        *,
        backend: str | None = "gloo",
        device: torch.device | None = None,
        timeout: timedelta | None = _TIMEOUT,
        alone: bool = False,
        own: bool = True,
    ) -> None:
        """Join the other ranks; RanksMissing tells those that do not come.

        purpose: what the group is for; ranks that come for the same thing find each other.
        backend: torch's name of it; None is the one that training uses.
        device: where tensors have to be for this backend; None is the CPU.
        timeout: how long an exchange may take; None is torch's own limit.
        alone: whether this process shares nothing with others, however many there are.
        own: False uses the group that training uses, for a trainer whose own group that is.
        """
        self.size = 1 if alone else world_size()
        self.rank = rank() if self.size > 1 else 0
        self.device = device or torch.device("cpu")
        self.is_first = self.rank == 0
        """Whether this is the process that writes and prints."""
        self.incomplete: Meeting | None = None
        """Who came, where not all did and this process goes on alone."""
        self._group: Any = None
        self._place: MeetingPlace | None = None
        self._process = os.getpid()
        self._pending: list[PendingArrays] = []
        if self.size == 1 or not own:
            return
        # Making a group waits for every rank, and counts groups: made on some ranks alone, it would
        # also give the user's next group two names, under which its ranks never find each other.
        self._place = MeetingPlace(purpose)
        met = self._place.meet("opening", meeting.PATIENCE)
        if met.missing:
            raise RanksMissing(met)
        self._group = dist.new_group(backend=backend, timeout=timeout and _CREATION)
        if timeout is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, self._group)
        _open_groups.append(self)

    @classmethod
    def or_alone(cls, purpose: str) -> "ProcessGroup":
        """All ranks; where some do not come, this process alone: `incomplete` tells who came.

        Of those that came the lowest rank is the first; whoever comes late is not.
        """
        try:
            return cls(purpose)
        except RanksMissing as missing:
            group = cls(alone=True)
            group.incomplete = missing.met
            group.is_first = rank() == min(missing.met.present)
            return group

    @classmethod
    def among(cls, ranks: Sequence[int], device: torch.device | None) -> "ProcessGroup":
        """Some ranks, this one among them, which come here from one point of the program."""
        group = cls(alone=True, device=device)
        if len(ranks) > 1:
            group.size = len(ranks)
            group.rank = list(ranks).index(rank())
            group.is_first = group.rank == 0
            group._group = dist.new_group(list(ranks), use_local_synchronization=True)
            group._place = MeetingPlace("among " + " ".join(map(str, ranks)))
            _open_groups.append(group)
        return group

    @property
    def is_usable(self) -> bool:
        """Whether it can still be used: neither closed nor destroyed together with training's."""
        return self.size == 1 or _is_known(self._group or dist.group.WORLD)

    def meet(self, name: str, patience: float) -> Meeting:
        """Who comes to an exchange; without all of them it must not begin, for it would not end."""
        if self._place is None:
            return Meeting((0,), 1, patience)
        return self._place.meet(name, patience)

    def forget_meeting(self, name: str) -> None:
        """All ranks have heard how it went; for the first rank."""
        if self._place is not None:
            self._place.forget(name)

    def leave(self) -> None:
        """Take part in no further exchange: the others are told, and do not wait for this rank."""
        if self._place is not None and is_distributed():
            self._place.leave()

    def _arrive(self, work: Any) -> None:
        # On a device waiting is ordered, not done; asking whether it is done would be waiting.
        if dist.get_backend(self._group) == dist.Backend.GLOO:
            _wait_unless_left(work, self._place)
        else:
            work.wait()

    # Arrays, without waiting.

    def start_gather(self, array: npt.NDArray[np.float64]) -> PendingArrays:
        """Start gathering equally shaped arrays from all ranks."""
        mine = torch.from_numpy(np.ascontiguousarray(array))
        if self.size == 1:
            return PendingArrays(None, mine, [mine])
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(parts, mine, group=self._group, async_op=True)
        return self._under_way(PendingArrays(work, mine, parts, self._place))

    def start_sum(self, array: npt.NDArray[np.float64]) -> PendingArrays:
        """Start summing equally shaped arrays over all ranks."""
        total = torch.from_numpy(array.copy())
        if self.size == 1:
            return PendingArrays(None, total, [total])
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return self._under_way(PendingArrays(work, total, [total], self._place))

    def _under_way(self, arrays: PendingArrays) -> PendingArrays:
        self._pending = [earlier for earlier in self._pending if not earlier.done()]
        self._pending.append(arrays)
        return arrays

    # Tensors.

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, where the tensor is."""
        if self.size == 1:
            return tensor
        total = tensor.to(self.device, copy=True)
        self._arrive(dist.all_reduce(total, group=self._group, async_op=True))
        return total.to(tensor.device)

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over all ranks, in one message per type and device."""
        if self.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.all_reduce(flat, group=self._group)
            flat /= self.size
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather_rows(self, part: Tensor, rows: int) -> Tensor:
        """The whole of a tensor of which each rank holds equally many rows, the last ones fewer."""
        if self.size == 1:
            return part
        # One message needs equal parts: all are padded to the longest, and the end is cut off.
        most = -(-rows // self.size)
        padded = part.new_zeros((most, *part.shape[1:]))
        padded[: part.shape[0]] = part
        whole = part.new_empty((most * self.size, *part.shape[1:]))
        # torch 2.13 has renamed the function, and warns of the old name.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(whole, padded, group=self._group)
        return whole[:rows]

    def collect(self, mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Every rank's bytes, on rank 0, which knows how many each sends; nothing elsewhere."""
        if self.size == 1:
            return [mine]
        if self.rank != 0:
            if len(mine):
                dist.send(mine, dst=0, group=self._group)
            return []
        parts = [
            mine,
            *(torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths[1:]),
        ]
        for sender, part in enumerate(parts[1:], start=1):
            if len(part):
                dist.recv(part, src=sender, group=self._group)
        return parts

    # Numbers and objects.

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        if self.size == 1:
            return number
        box = torch.tensor(number, device=self.device)
        self._arrive(dist.all_reduce(box, dist.ReduceOp.MAX, self._group, async_op=True))
        return int(box)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.largest(int(flag)))

    def gather_objects(self, value: T) -> list[T] | None:
        """Every rank's value on rank 0, None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def barrier(self) -> None:
        """Go on when all ranks have come here."""
        if self.size > 1:
            dist.barrier(group=self._group)

    def close(self, patience: float = 0.0) -> None:
        """Give the group back; work under way gets so many seconds to arrive. Again: does nothing.

        Afterwards the group's threads are gone, or hold nothing that is Python's.
        """
        # Why this matters: gloo works in threads of its own, and lets go of the tensors only after
        # it has called the work complete. If all others have let go of them by then, that thread
        # frees them, and needs the interpreter's lock for it. A thread that waits for the lock
        # while the interpreter ends is ended by Python with pthread_exit, in the middle of a C++
        # destructor: "terminate called without an active exception", SIGABRT, after a script's
        # last line. So nothing may be left to a thread of gloo when the interpreter goes.
        group = self._group
        if group is None or os.getpid() != self._process:
            # A forked child has the group's object, but not its threads: nothing to wait for.
            return
        with contextlib.suppress(Exception):
            self.leave()
        until = time.monotonic() + patience
        while any(not arrays.done() for arrays in self._pending) and time.monotonic() < until:
            time.sleep(0.001)
        unfinished = [arrays for arrays in self._pending if not arrays.done()]
        self._pending = []
        self._group = None
        self.size = 1
        if self in _open_groups:
            _open_groups.remove(self)
        if unfinished:
            # Destroying it would wait for ranks that may never come: it stays, with its tensors.
            _leak(group)
            for arrays in unfinished:
                arrays.leak()
        if _is_known(group):
            dist.destroy_process_group(group)
        # The last reference: torch joins the threads here, with the interpreter's lock released.
        del group


_open_groups: list[ProcessGroup] = []
_shared: dict[tuple[int, ...] | None, ProcessGroup] = {}


def shared_group(
    ranks: tuple[int, ...] | None = None, device: torch.device | None = None
) -> ProcessGroup:
    """One group of our own for single looks, made at the first; call it on every rank alike.

    ranks: those that look together, this one among them; None is all, with arrays alone.
    device: where their tensors are.
    """
    size = world_size() if ranks is None else len(ranks)
    known = _shared.get(ranks)
    if known is None or not known.is_usable or known.size != size:
        if known is not None:
            known.close()
        known = ProcessGroup("looks") if ranks is None else ProcessGroup.among(ranks, device)
        _shared[ranks] = known
    return known


class LeavingProblems:
    """Problems after which this rank takes part in no exchange: the others do not wait for it.

    A fault of ours on one rank must not hold up training on the others.
    """

    def __init__(self, problems: Problems, groups: Sequence[ProcessGroup] | None = None) -> None:
        """`groups`: those that it leaves; None is all of ours that are open then."""
        self._problems = problems
        self._groups = groups

    def report(self, key: str, message: str) -> None:
        """Say it, and leave."""
        self._problems.report(key, message)
        for group in list(_open_groups if self._groups is None else self._groups):
            group.leave()


def open_groups() -> int:
    """How many groups of ours are open in this process."""
    return len(_open_groups)


# Registered when this module is imported, so before anything that uses a group can register its
# own: hooks run in reverse order, and whoever uses a group is finished when the groups are closed.
def _close_all() -> None:
    guard = Guard(None, "groups", "a process group was not closed")
    for group in _open_groups:
        guard.attempt(group.close, _EXIT_PATIENCE)


atexit.register(partial(Guard(None, "groups", "groups were not closed").attempt, _close_all))


def _wait_unless_left(work: Any, place: MeetingPlace | None) -> None:
    """Wait for an exchange; an error where a rank has left, for then it may never end."""
    asked = time.monotonic()
    left: float | None = None
    for pause in meeting.pauses():
        if work.is_completed():
            break
        time.sleep(pause)
        now = time.monotonic()
        if left is not None and now > left + _LAST_WORD:
            raise GradsightError("another rank has stopped looking; its own message says why")
        if left is None and place is not None and now > asked + _BETWEEN_QUESTIONS:
            asked = now
            left = now if place.somebody_left() else None
    work.wait()


def _is_known(group: Any) -> bool:
    """Whether torch still has this group; it forgets all of them with training's own."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def _leak(owned: Any) -> None:
    """Keep an object for good: one reference more than there will ever be owners."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))
