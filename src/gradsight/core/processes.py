"""The processes that train together, and how the model is spread over them. Everything here also
works in one process.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsight.core.distributed import is_sharded
from gradsight.errors import UsageError


def pick_device(wanted: str) -> torch.device:
    """The device of this process."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: this torch sees no GPU. Use --device cpu, or install a CUDA build of torch"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise UsageError(
            f"{local + 1} processes on this machine, but only {torch.cuda.device_count()} GPUs: start fewer"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


class Processes:
    """This process among those that train together, as torchrun or our own launcher started them."""

    def __init__(self, device: str = "auto") -> None:
        self.device = pick_device(device)
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.world > 1 else 0
        self._control: Any = None
        self._joined_here = self.world > 1 and not dist.is_initialized()
        if self._joined_here:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        if self.world > 1:
            self._control = dist.new_group(backend="gloo")

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def spread(self, model: nn.Module, parallel: str, blocks: Sequence[nn.Module]) -> nn.Module:
        """The model as these processes share it: replicated (ddp) or sharded block by block (fsdp)."""
        if self.world == 1:
            return model
        if parallel == "ddp":
            return DistributedDataParallel(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes."""
        return self.sum(value) / self.world

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether any process says so; asked on the CPU, so that no GPU has to be waited for."""
        if self.world == 1:
            return flag
        box = torch.tensor(int(flag))
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._control)
        return bool(box)

    def gather(self, value: Tensor) -> list[Tensor] | None:
        """Every process's tensor on the first one, None on the others."""
        if self.world == 1:
            return [value]
        found: list[Any] | None = [None] * self.world if self.first else None
        dist.gather_object(value, found, group=self._control)
        return found

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.world > 1:
            dist.barrier(group=self._control)

    def close(self) -> None:
        """Leave the group, if it was joined here."""
        if self._joined_here and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def reduced_at_last(model: nn.Module, last: bool) -> Iterator[None]:
    """Under DDP only the last micro-batch's backward pass sends gradients; they have added up by
    then.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield


def held_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor as a parameter is held: on its device, and sharded like it."""
    if not is_sharded(parameter):
        return whole.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements)


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which every process may hold a part, put together; to be called on all of them."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full
