"""The processes that train together, and a process group of our own among them.

Everything here also works in one plain process, where every exchange is with itself.
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=10)
_EXIT_PATIENCE = 3.0
"""Seconds that work under way gets to arrive when the interpreter ends."""


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank; 0 where there is only one."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if is_distributed() else 1


def join_training(backend: str) -> None:
    """Become one of the processes that torchrun, or our own launcher, has started."""
    dist.init_process_group(backend)


def leave_training() -> None:
    """Leave them again."""
    if is_distributed():
        dist.destroy_process_group()


class PendingArrays:
    """Arrays on their way between the ranks."""

    def __init__(self, work: Any, mine: Tensor, parts: list[Tensor]) -> None:
        self._work = work
        self._mine = mine
        self._parts = parts

    def done(self) -> bool:
        """Whether `wait` would not wait."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> list[npt.NDArray[np.float64]]:
        """Every rank's array, in the order of ranks; of a sum, the sum alone."""
        if self._work is not None:
            self._work.wait()
        return [part.numpy() for part in self._parts]

    def leak(self) -> None:
        """Keep the tensors for good, also beyond the end of the interpreter."""
        for owned in (self._work, self._mine, *self._parts):
            _leak(owned)


class ProcessGroup:
    """All processes, in a group of our own, so that nothing of ours runs on training's.

    To be made on every rank at the same point, and to be used in the same order on all of them.
    """

    def __init__(
        self,
        *,
        backend: str | None = "gloo",
        device: torch.device | None = None,
        timeout: timedelta | None = _TIMEOUT,
        meeting: timedelta | None = None,
        alone: bool = False,
        own: bool = True,
    ) -> None:
        """Join the other ranks.

        backend: torch's name of it; None is the one that training uses.
        device: where tensors have to be for this backend; None is the CPU.
        timeout: how long an exchange may take; None is torch's own limit.
        meeting: how long the ranks may take to come here; None is as long as `timeout`.
        alone: whether this process shares nothing with others, however many there are.
        own: False uses the group that training uses, for a trainer whose own group that is.
        """
        self.size = 1 if alone else world_size()
        self.rank = rank() if self.size > 1 else 0
        self.device = device or torch.device("cpu")
        self._group: Any = None
        self._process = os.getpid()
        self._pending: list[PendingArrays] = []
        if self.size == 1 or not own:
            return
        if meeting is not None:
            _meet(meeting)
        self._group = dist.new_group(backend=backend, timeout=meeting or timeout)
        if meeting is not None and timeout is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, self._group)
        _open_groups.append(self)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    @property
    def is_usable(self) -> bool:
        """Whether it can still be used: neither closed nor destroyed together with training's."""
        return self.size == 1 or _is_known(self._group or dist.group.WORLD)

    # Arrays, without waiting.

    def start_gather(self, array: npt.NDArray[np.float64]) -> PendingArrays:
        """Start gathering equally shaped arrays from all ranks."""
        mine = torch.from_numpy(np.ascontiguousarray(array))
        if self.size == 1:
            return PendingArrays(None, mine, [mine])
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(parts, mine, group=self._group, async_op=True)
        return self._under_way(PendingArrays(work, mine, parts))

    def start_sum(self, array: npt.NDArray[np.float64]) -> PendingArrays:
        """Start summing equally shaped arrays over all ranks."""
        total = torch.from_numpy(array.copy())
        if self.size == 1:
            return PendingArrays(None, total, [total])
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return self._under_way(PendingArrays(work, total, [total]))

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
        dist.all_reduce(total, group=self._group)
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
        parts = [mine, *(torch.empty(length, dtype=torch.uint8) for length in lengths[1:])]
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
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group)
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
_shared: list[ProcessGroup] = []


def shared_group() -> ProcessGroup:
    """One group of our own for single looks, made at the first; call it on every rank alike."""
    if not _shared or not _shared[0].is_usable or _shared[0].size != world_size():
        for stale in _shared:
            stale.close()
        _shared[:] = [ProcessGroup()]
    return _shared[0]


def open_groups() -> int:
    """How many groups of ours are open in this process."""
    return len(_open_groups)


# Registered when this module is imported, so before anything that uses a group can register its
# own: hooks run in reverse order, and whoever uses a group is finished when the groups are closed.
@atexit.register
def _close_all() -> None:
    for group in _open_groups:
        with contextlib.suppress(Exception):
            group.close(_EXIT_PATIENCE)


def _is_known(group: Any) -> bool:
    """Whether torch still has this group; it forgets all of them with training's own."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def _leak(owned: Any) -> None:
    """Keep an object for good: one reference more than there will ever be owners."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


_meetings = itertools.count()


def _meet(patience: timedelta) -> None:
    """Return when every rank has come; raise if one does not.

    To be called before anything is shared that could then be torn.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    meeting = next(_meetings)
    keys = [f"gradsight/meeting/{meeting}/{other}" for other in range(world_size())]
    mine = keys[dist.get_rank()]
    store.set(mine, "here")
    try:
        store.wait(keys, patience)
    except Exception as error:
        store.delete_key(mine)
        raise TimeoutError(f"waited {patience.total_seconds():g} s") from error
