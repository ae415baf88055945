"""Run by every rank of test_parallel: steps under DDP and FSDP2, checkpointed and not."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsight import apply_checkpointing, measure_peak_memory
from gradsight.memory.storages import storages
from memory.allocator import allocator_peak


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Sequential(*(Block(32) for _ in range(4))), nn.Linear(32, 1)
    )


def ddp(plain: nn.Module) -> nn.Module:
    return DistributedDataParallel(plain)


def fsdp(plain: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in plain[1]:  # type: ignore[attr-defined, index]
        fully_shard(block, mesh=mesh)
    return fully_shard(plain, mesh=mesh)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def gradients(
    wrap: Callable[[nn.Module], nn.Module], policy: str | None, order: str
) -> tuple[dict[str, Any], int]:
    plain = model()
    if policy and order == "before":
        apply_checkpointing(plain, policy)
    wrapped = wrap(plain)
    if policy and order == "after":
        apply_checkpointing(wrapped, policy)
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(128, 16)
    if policy and order == "checked":
        apply_checkpointing(wrapped, policy, check=batch, loss_fn=loss)
    use = measure_peak_memory(lambda: wrapped(batch).square().mean().backward())
    found = {name.removeprefix("module."): p.grad for name, p in wrapped.named_parameters()}
    local = {
        name: copy.deepcopy(getattr(grad, "_local_tensor", grad)) for name, grad in found.items()
    }
    return local, use.peak_bytes


def measured_as_allocated() -> None:
    """FSDP2 frees and refills its storages; the measured peak is the allocator's all the same."""
    wrapped = fsdp(model())
    batch = torch.randn(128, 16)

    def step() -> None:
        wrapped.zero_grad()
        wrapped(batch).square().mean().backward()

    step()  # the first step makes what stays
    use = measure_peak_memory(step)
    wrapped.zero_grad()
    held = [storage for p in (*wrapped.parameters(), batch) for storage in storages(p)]
    # gloo's threads free memory that no record tells of, so that a reading may be too high: the one
    # that has the least left over is true.
    readings = []
    for _ in range(8):
        wrapped.zero_grad()
        readings.append(allocator_peak(step))
    read = min(readings, key=lambda read: (read.left, read.everything))
    expected = sum(storage.nbytes() for storage in held) + read.everything
    assert abs(use.peak_bytes - expected) <= 64, (use, expected)
    if dist.get_rank() == 0:
        print("fsdp measured same", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    measured_as_allocated()
    for wrap in (ddp, fsdp):
        expected, plain_peak = gradients(wrap, None, "")
        for policy, order in (
            ("full", "before"),
            ("full", "after"),
            ("full", "checked"),
            ("selective", "after"),
        ):
            found, peak = gradients(wrap, policy, order)
            assert found.keys() == expected.keys(), (wrap, policy, order)
            wrong = [name for name in expected if not torch.equal(expected[name], found[name])]
            assert not wrong, (wrap.__name__, policy, order, wrong)
            assert peak < plain_peak or policy == "selective", (
                wrap.__name__,
                policy,
                order,
                peak,
                plain_peak,
            )
            if dist.get_rank() == 0:
                print(f"{wrap.__name__} {policy} {order} same", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
