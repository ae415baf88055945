"""Skips and stops on two ranks; only one entry of one gradient is bad, in the last rank's shard.

Called by torchrun as: brake_ranks.py RUN_DIR
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradsight

STEPS = 8
BAD = (2, 5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.extra = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        # The gradient of `extra` is `factors`, whatever the loss is.
        return self.layer(x).square().mean() + (self.extra * factors).sum()


def parallel(kind: str) -> nn.Module:
    return DistributedDataParallel(Net()) if kind == "ddp" else fully_shard(Net())


def train(model: nn.Module, optimizer: Optimizer, steps: list[int], bad: tuple[int, ...]) -> int:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        factors = torch.ones(4)
        if step in bad:
            factors[3] = math.nan
        model(torch.randn(3, 4, generator=generator), factors).backward()
        try:
            optimizer.step()
        except gradsight.StopTraining as stopped:
            found = stopped.finding
            return step if (found.code, found.first_step) == ("GS103", bad[0]) else -2
        optimizer.zero_grad()
    return -1


def weights(model: nn.Module) -> list[Tensor]:
    return [getattr(each, "_local_tensor", each).detach().clone() for each in model.parameters()]


def skips(kind: str, run_dir: Path) -> None:
    model = parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=run_dir, on_finding="skip", quiet=True):
        train(model, optimizer, list(range(STEPS)), BAD)
    twin = parallel(kind)
    good = [step for step in range(STEPS) if step not in BAD]
    train(twin, torch.optim.AdamW(twin.parameters(), lr=0.1), good, ())
    for mine, other in zip(weights(model), weights(twin), strict=True):
        assert torch.equal(mine, other), kind


def main() -> None:
    dist.init_process_group("gloo")
    run_dir = Path(sys.argv[1])
    for kind in ("ddp", "fsdp"):
        skips(kind, run_dir / kind)
    stopped = []
    for kind in ("ddp", "fsdp"):
        model = parallel(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with gradsight.watch(model, optimizer, on_finding={"GS103": "stop"}, quiet=True):
            stopped.append(train(model, optimizer, list(range(STEPS)), BAD))
    by_rank: list[list[int] | None] = [None, None]
    dist.all_gather_object(by_rank, stopped)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(by_rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
