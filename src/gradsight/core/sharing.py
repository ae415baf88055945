"""The processes that train a model together: sums, means and shards over a group of our own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsight.core.distributed import is_sharded, local_part
from gradsight.errors import GradsightError


def like(parameter: Any, values: Tensor) -> Tensor:
    """This process's part of a tensor, as a whole that lies on the processes as the parameter does."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole


def reshard(model: nn.Module) -> None:
    """Shard a model's parameters again that a forward pass without a backward pass, an evaluation,
    has left whole.

    FSDP2 keeps its outermost parameters whole for a backward pass to come; until then the model's
    own parameters are other tensors than those that the optimizer has.
    """
    if dist.is_available() and dist.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule) and not all(
                is_sharded(p) for p in module.parameters()
            ):
                module.reshard()


class Ranks:
    """The processes that train this model together, with a group of our own."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        sharded = [p for p in model.parameters() if is_sharded(p)]
        self.sharded = bool(sharded)
        replicated = any(isinstance(m, DistributedDataParallel) for m in model.modules())
        self.size = (
            dist.get_world_size() if (self.sharded or replicated) and dist.is_initialized() else 1
        )
        for parameter in sharded:
            self._check_mesh(parameter)
        self.rank = dist.get_rank() if self.size > 1 else 0
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._group = dist.new_group(backend=None) if self.size > 1 else None

    def _check_mesh(self, parameter: Any) -> None:
        from torch.distributed.tensor import Shard

        mesh, placements = parameter.device_mesh, parameter.placements
        if (
            mesh.ndim != 1
            or mesh.size() != self.size
            or not (isinstance(placements[0], Shard) and placements[0].dim == 0)
        ):
            raise GradsightError(
                f"expected parameters sharded over all {self.size} processes along dimension 0 (fully_shard on one mesh), got "
                f"{placements} on a mesh of shape {tuple(mesh.shape)}. Other ways of sharding are not supported by the "
                "ghost engine."
            )

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self._group is None:
            return tensor
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(tensor.device)

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in one message per type and device."""
        if self._group is None:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            flat = torch.cat([t.reshape(-1) for t in same])
            dist.all_reduce(flat, group=self._group)
            flat /= self.size
            for tensor, part in zip(
                same, torch.split(flat, [t.numel() for t in same]), strict=True
            ):
                tensor.copy_(part.view_as(tensor))

    def gather_shards(self, sharded: Tensor) -> Tensor:
        """The whole of a tensor of which each process holds some rows, by padding to equal shards."""
        if not is_sharded(sharded):
            return sharded
        part, rows = local_part(sharded), -(-sharded.shape[0] // self.size)
        padded = part.new_zeros((rows, *sharded.shape[1:]))
        padded[: part.shape[0]] = part
        whole = part.new_empty((rows * self.size, *sharded.shape[1:]))
        gather = getattr(
            dist, "all_gather_single", dist.all_gather_into_tensor
        )  # torch 2.13 has renamed it, and warns
        gather(whole, padded, group=self._group)
        return whole[: sharded.shape[0]]

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Every process's value on the first one, None on the others."""
        if self._group is None:
            return [value]
        values = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def close(self) -> None:
        """Give our group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group, self.size = None, 1

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of all processes' numbers."""
        if self._group is None:
            return number
        tensor = torch.tensor(number, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return int(tensor)


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Backward passes in here stay in this process (under DistributedDataParallel)."""
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        yield
