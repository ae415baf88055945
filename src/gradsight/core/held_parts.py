"""Which rank's part of a parameter counts, where ranks hold parts of it and replicas of parts.

Ranks tell each other once what they hold: a mesh says where its own ranks stand, but not which
ranks of other meshes hold the same (a parameter that is sharded over `dp` alone is held once more
by every rank of `tp`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradsight.core.group import ProcessGroup
from gradsight.core.shards import is_sharded
from gradsight.errors import CannotBeSeen

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Held:
    """One rank's part of a parameter: its place along the axes of the mesh that divide it."""

    name: str
    shape: tuple[int, ...]
    place: tuple[int, ...] | None
    """None where this rank holds nothing of it."""
    places: int = 1
    """How many parts make up the whole."""
    is_summand: bool = False
    """Whether it is no part, but one of the numbers that the whole is the sum of."""


def parts_left_out(
    group: ProcessGroup, tensors: Sequence[Tensor], names: Sequence[str] = ()
) -> list[bool]:
    """Of which parameters another rank's part is counted, because it is the same as this rank's.

    To be called on all ranks of the group. Refuses what no sum over ranks makes whole.
    """
    if group.size == 1:
        return [False] * len(tensors)
    known_by = list(names) or [f"number {index}" for index in range(len(tensors))]
    mine = [_held(name, tensor) for name, tensor in zip(known_by, tensors, strict=True)]
    everyone = group.from_first(group.gather_objects(mine))
    if everyone is None:
        raise AssertionError("rank 0 has gathered what all ranks hold")
    _refuse_other_parameters(everyone)
    return [_is_left_out(group.rank, held) for held in zip(*everyone, strict=True)]


def _held(name: str, tensor: Tensor) -> _Held:
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return _Held(name, shape, ())
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    where = mesh.get_coordinate()
    place = None if where is None else tuple(where[axis] for axis in axes)
    is_summand = any(placement.is_partial() for placement in placements)
    return _Held(name, shape, place, math.prod(mesh.size(axis) for axis in axes), is_summand)


def _refuse_other_parameters(everyone: Sequence[Sequence[_Held]]) -> None:
    """All ranks must hold the same parameters: one record has one list of them."""
    first = {held.name: held.shape for held in everyone[0]}
    for rank, theirs in enumerate(everyone):
        other = {held.name: held.shape for held in theirs}
        if list(other.items()) == list(first.items()):
            continue
        differing = sorted({name for name, _ in first.items() ^ other.items()})
        shown = ", ".join(differing[:_SHOWN]) or "their order"
        raise CannotBeSeen(
            f"rank 0 and rank {rank} hold different parameters ({shown}), as the stages of a "
            "pipeline do; the whole gradient is on no rank, and one record cannot hold both. Use "
            "FSDP2, DDP or tensor parallelism, or train without Gradsight."
        )


def _is_left_out(rank: int, held: Sequence[_Held]) -> bool:
    """Whether a lower rank holds the same part."""
    if any(each.is_summand for each in held):
        raise CannotBeSeen(
            f"the parameter {held[0].name} is the sum of what the ranks hold (a Partial placement);"
            " no statistic of a summand would be true. Reduce it before it is trained."
        )
    places = {each.place for each in held if each.place is not None}
    if len(places) != held[0].places:
        raise CannotBeSeen(
            f"the ranks hold {len(places)} of the {held[0].places} parts of {held[0].name}: "
            "the others are on no rank that trains with these, so its gradient is never whole"
        )
    mine = held[rank].place
    return mine is None or any(other.place == mine for other in held[:rank])
