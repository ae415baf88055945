"""The ranks that write a dump together, in a group of their own, and where a shard lies in its
tensor.

Everything works undistributed too. Nothing here runs on the group that training uses.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsight.core.distributed import is_sharded, world_size

JOINING = timedelta(minutes=2)
"""How long the ranks may take to meet at their first dump."""
WRITING = timedelta(minutes=60)
"""How long the fastest rank waits for the slowest to write."""


class Ranks:
    """The ranks that write a dump together; alone, every exchange is with itself."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def join(cls) -> "Ranks":
        """Make a gloo group over all ranks; called by every rank, at the same point of its program."""
        if world_size() == 1:
            return cls()
        _meet()
        group = dist.new_group(backend="gloo", timeout=JOINING)
        dist.distributed_c10d._set_pg_timeout(WRITING, group)
        return cls(dist.get_rank(), world_size(), group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0; nothing elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def collect(self, mine: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's bytes, on rank 0, which knows how many each sends; nothing elsewhere."""
        if self.rank != 0:
            if len(mine):
                dist.send(mine, dst=0, group=self._group)
            return []
        parts = [mine, *(torch.empty(length, dtype=torch.uint8) for length in lengths[1:])]
        for rank, part in enumerate(parts[1:], start=1):
            if len(part):
                dist.recv(part, src=rank, group=self._group)
        return parts


_meetings = itertools.count()


def _meet() -> None:
    """Return when every rank has come; raise if one does not, before anything is shared that could
    then be torn.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    meeting = next(_meetings)
    keys = [f"gradsight/dump/{meeting}/{rank}" for rank in range(world_size())]
    mine = keys[dist.get_rank()]
    store.set(mine, "here")
    try:
        store.wait(keys, JOINING)
    except Exception as error:
        store.delete_key(mine)
        raise TimeoutError(f"waited {JOINING.total_seconds():g} s") from error


@dataclass(frozen=True, slots=True)
class Place:
    """Where the local part of a gradient lies in the whole, and whether this rank is the one to
    write it.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    mesh: str | None = None
    placements: tuple[str, ...] = ()
    writes: bool = True
    partial: bool = False


def sharding(tensor: torch.Tensor) -> object:
    """What two tensors of the same shape must share to lie on the ranks in the same way."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # type: ignore[attr-defined]


def place_of(tensor: torch.Tensor, turn: int) -> Place:
    """Where this rank's part lies; of a shard with replicas, replica number `turn` (modulo their
    count) writes.
    """
    if is_sharded(tensor):
        return _sharded_place(tensor.shape, tensor.device_mesh, tensor.placements, turn)  # type: ignore[attr-defined]
    shape = tuple(tensor.shape)
    return Place(shape, (0,) * len(shape), shape)


def _sharded_place(shape: torch.Size, mesh: Any, placements: Any, turn: int) -> Place:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    where = mesh.get_coordinate()
    return Place(
        tuple(shape),
        tuple(offsets),
        tuple(sizes),
        mesh=_mesh_text(mesh),
        placements=tuple(repr(placement) for placement in placements),
        writes=where is not None
        and _replica(mesh, where, axes) == turn % math.prod(mesh.size(axis) for axis in axes),
        partial=any(placement.is_partial() for placement in placements),
    )


def _replica(mesh: Any, where: Sequence[int], axes: Sequence[int]) -> int:
    """The number of this rank among those that hold the same shard."""
    number = 0
    for axis in axes:
        number = number * mesh.size(axis) + where[axis]
    return number


def _mesh_text(mesh: Any) -> str:
    """A mesh in words: `2x4 (dp, fsdp) on cuda`."""
    names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
    return "x".join(str(length) for length in mesh.shape) + f"{names} on {mesh.device_type}"
