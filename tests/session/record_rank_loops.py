"""Training loops on two ranks; rank 0 writes what every record has to hold.

Called by torchrun as: record_rank_loops.py FOLDER NAME ...
"""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsight

STEPS = 10


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3]).square().mean()


class AveragingSGD(torch.optim.SGD):
    """Averages gradients over the ranks inside its own step, as Muon does, in tensors of its own."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            mean = parameter.grad.clone()
            dist.all_reduce(mean, op=dist.ReduceOp.SUM)
            with torch.no_grad():
                parameter -= 0.1 * mean / dist.get_world_size()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def reduce_by_hand(model: nn.Module, divisor: float = 2.0) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(divisor)


def reduce_and_clip(model: nn.Module) -> None:
    reduce_by_hand(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def reduce_in_hooks() -> nn.Module:
    model = mlp()

    def reduced(gradient: Tensor) -> Tensor:
        mean = gradient.clone()
        dist.all_reduce(mean)
        return mean / 2

    for parameter in model.parameters():
        parameter.register_hook(reduced)
    return model


def truth(model: nn.Module, step: int, ranks: range, factor: float) -> dict[str, float]:
    """Norms of the mean gradient over these ranks' batches, in float64."""
    alone = copy.deepcopy(getattr(model, "module", model)).double()
    for parameter in alone.parameters():
        parameter.grad = None
        parameter._backward_hooks = None
    for rank in ranks:
        (loss_of(alone, batch(step, rank).double()) / len(ranks)).backward()
    return {name: factor * float(each.grad.norm()) for name, each in alone.named_parameters()}


def train(
    run_dir: Path,
    model: nn.Module,
    called: nn.Module | None = None,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    edit: Callable[[nn.Module], None] = lambda model: None,
    same_batch: bool = False,
    whole: bool = True,
    factor: float = 1.0,
) -> list[dict[str, float]]:
    """`whole`: the record holds the mean over ranks; else rank 0's own gradient, times `factor`."""
    optimizer = make(model)
    rank = dist.get_rank()
    expected = []
    with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True):
        for step in range(STEPS):
            number = 0 if same_batch else rank
            ranks = range(1) if same_batch or not whole else range(2)
            expected.append(truth(model, step, ranks, factor))
            loss_of(called or model, batch(step, number)).backward()
            edit(model)
            optimizer.step()
            optimizer.zero_grad()
            # The other ranks' checksums of this step are there when the next one ends.
            dist.barrier()
    return expected


def module_of_ddp(run_dir: Path) -> list[dict[str, float]]:
    """The wrapper's module is called, so that nothing is reduced but by hand."""
    model = DistributedDataParallel(mlp())
    return train(run_dir, model, called=model.module, edit=reduce_by_hand)


def accumulating(run_dir: Path) -> list[dict[str, float]]:
    """A first micro-batch stays in its process."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    expected = []
    with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True):
        for step in range(STEPS):
            expected.append(truth(model, step, range(2), 2.0))
            with model.no_sync():
                loss_of(model, batch(step, dist.get_rank())).backward()
            loss_of(model, batch(step, dist.get_rank())).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return expected


def sharded(run_dir: Path) -> list[dict[str, float]]:
    alone, model = mlp(), fully_shard(mlp())
    optimizer, beside = sgd(model), sgd(alone)
    expected = []
    with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True):
        for step in range(STEPS):
            expected.append(truth(alone, step, range(2), 1.0))
            beside.zero_grad()
            for rank in range(2):
                (loss_of(alone, batch(step, rank)) / 2).backward()
            beside.step()
            loss_of(model, batch(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
    return expected


LOOPS: dict[str, Callable[[Path], list[dict[str, float]]]] = {
    "ddp": lambda run_dir: train(run_dir, DistributedDataParallel(mlp())),
    "ddp_accumulating": accumulating,
    "ddp_identical_batches": lambda run_dir: train(
        run_dir, DistributedDataParallel(mlp()), same_batch=True
    ),
    "ddp_module_reduced_by_hand": module_of_ddp,
    "mean_by_hand": lambda run_dir: train(run_dir, mlp(), edit=reduce_by_hand),
    "sum_by_hand": lambda run_dir: train(
        run_dir, mlp(), edit=lambda model: reduce_by_hand(model, 1.0), factor=2.0
    ),
    "mean_by_hand_clipped": lambda run_dir: train(run_dir, mlp(), edit=reduce_and_clip),
    "mean_in_hooks": lambda run_dir: train(run_dir, reduce_in_hooks()),
    "averaged_inside_step": lambda run_dir: train(
        run_dir, mlp(), make=lambda model: AveragingSGD(model.parameters(), lr=0.1), whole=False
    ),
    "ddp_forgotten": lambda run_dir: train(run_dir, mlp(), whole=False),
    "fsdp2": sharded,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        expected = LOOPS[name](folder / name)
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(expected))
    dist.destroy_process_group()
