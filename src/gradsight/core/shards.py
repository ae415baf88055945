"""Tensors of which every rank may hold a part (DTensor): the part, its place, and the whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this tensor is a DTensor, of which this rank may hold only a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def are_spread(parameters: Sequence[Tensor]) -> bool:
    """Whether ranks hold different parts of these parameters."""
    return any(is_sharded(parameter) for parameter in parameters)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the tensor itself unless it is a DTensor."""
    # The attribute, not `to_local()`: that one goes through autograd and costs more than the
    # statistics of a bias.
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharding(tensor: Tensor) -> object:
    """What two tensors of the same shape must share to lie on the ranks in the same way."""
    if not is_sharded(tensor):
        return None
    return (tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """This rank's part of a tensor, as a whole that lies on the ranks as the parameter does."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import DTensor

    sharded: Tensor = DTensor.from_local(
        values,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded


def held_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor as a parameter is held: on its device, and sharded like it."""
    if not is_sharded(parameter):
        return whole.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    placements = parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements)


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from all ranks' parts; to be called on all of them."""
    if not is_sharded(tensor):
        return tensor
    full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


@dataclass(frozen=True, slots=True)
class Place:
    """Where the local part of a tensor lies in the whole, and whether this rank is to write it."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    mesh: str | None = None
    placements: tuple[str, ...] = ()
    writes: bool = True
    partial: bool = False


def place_of(tensor: Tensor, turn: int) -> Place:
    """Where this rank's part lies.

    Of a shard with replicas, replica number `turn` (modulo their count) writes.
    """
    if is_sharded(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        placements = tensor.placements  # type: ignore[attr-defined]
        return _sharded_place(tensor.shape, mesh, placements, turn)
    shape = tuple(tensor.shape)
    return Place(shape, (0,) * len(shape), shape)


def _sharded_place(shape: Size, mesh: Any, placements: Any, turn: int) -> Place:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    replicas = math.prod(mesh.size(axis) for axis in axes)
    where = mesh.get_coordinate()
    return Place(
        tuple(shape),
        tuple(offsets),
        tuple(sizes),
        mesh=_mesh_text(mesh),
        placements=tuple(repr(placement) for placement in placements),
        writes=where is not None and _replica(mesh, where, axes) == turn % replicas,
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
