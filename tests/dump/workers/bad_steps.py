"""Two ranks whose gradient spikes once and is large later on; clipped, and dumped for it.

Called by torchrun as: bad_steps.py ddp|fsdp|silent RUN_DIR
"""

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsight
from gradsight import GradientDumper
from gradsight.health import rank_agreement

STEPS = 44
SPIKE = 20
LARGE = 36


def parallel(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model)


def whole(gradient: torch.Tensor) -> torch.Tensor:
    full = getattr(gradient, "full_tensor", None)
    return gradient.clone() if full is None else full()


def factor(step: int) -> float:
    """Of the loss: rank 1 alone has the batch that spikes."""
    if step == SPIKE:
        return 1e4 if dist.get_rank() == 1 else 1.0
    if step >= LARGE:
        return 3000.0 * 1.5 ** (step - LARGE)
    return 1.0


def main(kind: str, run: Path) -> None:
    model = parallel(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    if kind == "silent":
        rank_agreement.PATIENCE = timedelta(seconds=2)
    dumper = GradientDumper(run, step_interval=30, keep_last=2, dump_on="warning")
    true = {}
    torch.manual_seed(1 + dist.get_rank())
    # Comparisons of ranks arrive when they arrive: what is found of them is at no certain step.
    health = {"GS503": False}
    with gradsight.watch(model, optimizer, run_dir=run, dump=dumper, health=health) as watched:
        if kind == "silent" and dist.get_rank() == 1:
            # As if it had died: it trains, but answers no more.
            watched._line._early = None
        for step in range(STEPS):
            (model(torch.randn(4, 5)).square().mean() * factor(step)).backward()
            true[step] = {
                name.removeprefix("module."): whole(parameter.grad)
                for name, parameter in model.named_parameters()
            }
            nn.utils.clip_grad_norm_(model.parameters(), 300.0 if step >= LARGE else 0.1)
            optimizer.step()
            optimizer.zero_grad()
    dumper.close()
    if dist.get_rank() == 0:
        torch.save(true, run / "true.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] != "silent":
        warnings.simplefilter("error", gradsight.errors.GradsightWarning)
    dist.init_process_group("gloo")
    main(sys.argv[1], Path(sys.argv[2]))
    dist.destroy_process_group()
