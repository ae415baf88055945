# mypy: allow-untyped-calls
"""A model on several devices: DDP's buckets, and FSDP2 in a group that is not there.

DDP is one device plus its buckets: its reducer is C++ and wants real memory, so it is not run. Its
buckets are one copy of all gradients (bucket views are off by default). FSDP2 is run as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from gradsight.memory.blocks import find_blocks
from gradsight.memory.collectives import BUCKETS
from gradsight.memory.setting import StepSetting
from gradsight.memory.workload import Workload, backward
from gradsight.values.memory import MemoryUse


@contextmanager
def group_of(setting: StepSetting) -> Iterator[Any]:
    """The mesh of devices that FSDP2 shards over; None where the step runs as on one device.

    Enter it outside of fake tensors: a mesh looks at its own ranks.
    """
    if setting.ranks.parallel != "fsdp2":
        yield None
        return
    from gradsight.core.fake_group import fake_group

    with fake_group(setting.ranks.count) as mesh:
        yield mesh


def shard(workload: Workload, setting: StepSetting, mesh: Any) -> None:
    """Shard every block and then the model, and run one step, as every later one finds it.

    What FSDP2 makes in its first step (streams, the order of layers) is there in all others.
    """
    if mesh is None:
        return
    from gradsight.core.fake_group import shard_fully

    blocks = [module for _, module in find_blocks(workload.model, setting.blocks)]
    shard_fully([*blocks, workload.model], mesh)
    backward(workload)
    workload.model.zero_grad(set_to_none=True)


def bucket_bytes(model: nn.Module, setting: StepSetting, granule: int) -> int:
    """What DDP's buckets take beside the gradients; 0 without DDP."""
    if setting.ranks.parallel != "ddp":
        return 0
    sizes = [
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    # Parameters of a bucket lie in it one after the other: only the bucket itself is rounded up.
    return -(-sum(sizes) // granule) * granule


def with_buckets(use: MemoryUse, size: int) -> MemoryUse:
    """A peak on one device with DDP's buckets beside it, which live from the second step on."""
    if not size:
        return use
    by_kind = {**use.by_kind, BUCKETS: use.by_kind[BUCKETS] + size}
    bounds = use.bounds
    if bounds is not None:
        bounds = (bounds[0] + size, bounds[1] + size)
    return replace(use, peak_bytes=use.peak_bytes + size, by_kind=by_kind, bounds=bounds)
