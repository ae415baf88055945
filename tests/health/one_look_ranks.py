"""Two ranks look at their gradients once, under DDP and under FSDP2, and say what they found."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradsight


def parallel(kind: str) -> Any:
    """A layer whose norm is known: each of its six weights has the gradient 2."""
    layer = nn.Linear(3, 2, bias=False)
    nn.init.ones_(layer.weight)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(layer)
    return fully_shard(layer)


def main() -> None:
    dist.init_process_group("gloo")
    for step, kind in enumerate(["ddp", "fsdp"]):
        model = parallel(kind)
        model(torch.full((1, 3), 2.0)).sum().backward()
        told = gradsight.check_gradient_health(model, step)
        quiet = gradsight.check_gradient_health(model, step, quiet=True)
        assert told == quiet
        sys.stdout.flush()
        dist.barrier()
        # One write per line, and none inside another: both ranks share the pipe.
        os.write(1, f"rank {dist.get_rank()} {kind}: {told['total_norm']:.4f}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
