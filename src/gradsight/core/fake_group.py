"""A process group in which nothing is started: one rank of many, whose collectives move no data."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.errors import UsageError


@contextmanager
def fake_group(world_size: int) -> Iterator[DeviceMesh]:
    """Inside, this process is rank 0 of so many; the world size is a number and nothing else.

    Rank 0 holds the largest shard of every parameter, so its peak is that of the fullest rank.
    """
    if dist.is_initialized():
        raise UsageError(
            "a process group is initialised already, and several devices are predicted in a fake "
            "one: predict in a process of its own, before init_process_group"
        )
    refuse_unknown_torch("several devices")
    # Importing it registers the backend; torch tests its own collectives with it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def shard_fully(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """FSDP2 with its defaults on every module, in the given order: parts before what holds them."""
    from torch.distributed.fsdp import fully_shard

    for module in modules:
        fully_shard(module, mesh=mesh)
