"""The only place that knows torch.distributed and DTensor. Everything here also works in one plain
process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradsight.errors import GradsightError

_OWN_GROUP_TIMEOUT = timedelta(minutes=10)


def is_distributed() -> bool:
    """Whether this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """This process's rank; 0 where there is only one."""
    return torch.distributed.get_rank() if is_distributed() else 0


def world_size() -> int:
    """How many processes train together."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def is_sharded(tensor: Tensor) -> bool:
    """Whether this tensor is a DTensor, of which this rank may hold only a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the tensor itself unless it is a DTensor.

    The attribute is read, not `to_local()`: that one goes through autograd and costs more than the
    statistics of a bias.
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def counts_here(tensor: Tensor) -> bool:
    """Whether this rank's part is to be counted when parts are summed over all ranks: of replicas,
    only the first is.
    """
    if not is_sharded(tensor):
        return rank() == 0
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    for position, placement in zip(coordinate, placements, strict=True):
        if placement.is_partial():
            raise GradsightError(
                f"a gradient has the placement {placement}: its parts are not reduced over the ranks yet, "
                "so no statistic of it would be true. Look at gradients after they have been reduced."
            )
        if placement.is_replicate() and position != 0:
            return False
    return True


def reduces_gradients(model: nn.Module) -> bool:
    """False inside DistributedDataParallel's `no_sync`, where gradients are each rank's own."""
    return bool(getattr(model, "require_backward_grad_sync", True))


def replicated_parameters(model: nn.Module) -> set[int]:
    """The ids of parameters that DistributedDataParallel keeps alike on all ranks by reducing their
    gradients.
    """
    copied = [
        module
        for module in model.modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    over_all = [module for module in copied if module.process_group.size() == world_size()]
    return {
        id(parameter)
        for module in over_all
        for parameter in module.parameters()
        if not is_sharded(parameter)
    }


@dataclass(slots=True)
class Gathering:
    """A collective under way on our own group."""

    work: Any
    parts: list[Tensor]

    def done(self) -> bool:
        """Whether `wait` would not wait."""
        return bool(self.work.is_completed())

    def wait(self) -> list[npt.NDArray[np.float64]]:
        """Every rank's array, in the order of ranks."""
        self.work.wait()
        return [part.numpy() for part in self.parts]


class OwnGroup:
    """A process group of our own on the CPU, so that nothing of ours runs on the group that
    training uses.

    To be made on every rank at the same point.
    """

    def __init__(self) -> None:
        self._group = torch.distributed.new_group(backend="gloo", timeout=_OWN_GROUP_TIMEOUT)

    def gather(self, array: npt.NDArray[np.float64]) -> Gathering:
        """Start gathering equally shaped arrays from all ranks; does not wait."""
        mine = torch.from_numpy(np.ascontiguousarray(array))
        parts = [torch.empty_like(mine) for _ in range(world_size())]
        work = torch.distributed.all_gather(parts, mine, group=self._group, async_op=True)
        return Gathering(work, parts)

    def from_first_rank(self, number: int) -> int:
        """Rank 0's number, on every rank."""
        box = torch.tensor([number])
        torch.distributed.broadcast(box, src=0, group=self._group)
        return int(box)

    def sum(self, array: npt.NDArray[np.float64]) -> Gathering:
        """Start summing equally shaped arrays over all ranks; `wait()` gives the sum alone."""
        total = torch.from_numpy(array.copy())
        work = torch.distributed.all_reduce(total, group=self._group, async_op=True)
        return Gathering(work, [total])

    def close(self) -> None:
        """Give the group back."""
        if is_distributed():
            torch.distributed.destroy_process_group(self._group)


_shared: list[OwnGroup] = []


def shared_group() -> OwnGroup | None:
    """One group of our own for single looks, made at the first; None in one process. To be called
    on every rank alike.
    """
    if world_size() == 1:
        return None
    if not _shared:
        _shared.append(OwnGroup())
    return _shared[0]


def own_group() -> OwnGroup | None:
    """A group of our own where several processes train together. To be called on every rank at the
    same point.
    """
    return OwnGroup() if world_size() > 1 else None


def are_spread(parameters: Sequence[Tensor]) -> bool:
    """Whether ranks hold different parts of these parameters."""
    return any(is_sharded(parameter) for parameter in parameters)
