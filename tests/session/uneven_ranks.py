"""Two ranks that do not do the same: who opens a watch, when, and how many steps each makes.

Called by torchrun as: uneven_ranks.py FOLDER 'rank 0'|'rank 1', which is the rank that is alone in
opening a watch: ranks count their watches, so one of them can be alone but once. Every scenario is trained with and without us, ends
with a collective of the user's, and must leave the same weights.
"""

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsight
from gradsight.core import meeting
from gradsight.dump import turns
from gradsight.errors import GradsightWarning
from gradsight.session.step_builder import StepBuilder

STEPS, MORE = 4, 6
"""How many steps every rank makes, and how many more rank 0 makes under Join."""


def shared_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    if kind == "fsdp":
        return fully_shard(model)
    return DistributedDataParallel(model)


def opened(
    watching: Sequence[int], model: nn.Module, optimizer: Any, run_dir: Path, **options: Any
) -> list[Any]:
    """What this rank has to close in the end."""
    if dist.get_rank() not in watching:
        return []
    if options.pop("late", False) and dist.get_rank() == 1:
        time.sleep(1.0)
    dumper = gradsight.GradientDumper(run_dir, **options)
    return [gradsight.watch(model, optimizer, run_dir=run_dir, dump=dumper, quiet=True), dumper]


def train(kind: str, run_dir: Path | None, watching: Sequence[int], **options: Any) -> list[Any]:
    model = shared_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    closable = []
    if run_dir is not None:
        closable = opened(watching, model, optimizer, run_dir, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    steps = STEPS
    if kind == "join" and dist.get_rank() == 0:
        steps += MORE
    with Join([model]) if kind == "join" else nullcontext():
        for number in range(steps):
            if number == STEPS and closable:
                # From here on rank 0 is alone; all dumps before were written by both ranks.
                closable[1].wait()
                turns._UNEVEN_PATIENCE = 1.0
            model(torch.randn(3, 6, generator=generator)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    for each in closable:
        each.close()
    # A group of the user's own: made in the same order on all ranks, whatever we have made.
    mine = torch.ones(1)
    dist.all_reduce(mine, group=dist.new_group())
    assert mine.item() == 2
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


@contextmanager
def a_fault_on_rank_1() -> Iterator[None]:
    """A fault of ours at the second step: rank 1 looks no more, and rank 0 must not wait for it."""
    original = StepBuilder.end_step

    def end_step(self: StepBuilder, *args: Any) -> Any:
        if dist.get_rank() == 1 and self.step == 1:
            raise RuntimeError("planted")
        return original(self, *args)

    StepBuilder.end_step = end_step
    try:
        yield
    finally:
        StepBuilder.end_step = original


def compare(name: str, kind: str, watching: Sequence[int], **options: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = train(kind, Path(sys.argv[1]) / name, watching, **options)
    alone = train(kind, None, ())
    assert all(map(torch.equal, watched, alone)), "training was changed"
    for one in caught:
        if issubclass(one.category, GradsightWarning):
            sys.stdout.write(f"{name} rank {dist.get_rank()}: {one.message}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert turns._UNEVEN_PATIENCE < meeting.PATIENCE < 20
    # No rank that comes may be late on a busy machine; one that never comes is given up soon.
    turns._UNEVEN_PATIENCE = meeting.PATIENCE = 100.0
    dist.init_process_group("gloo")
    if sys.argv[2] == "rank 0":
        compare("late", "ddp", (0, 1), late=True)
        compare("join", "join", (0, 1))
        turns._UNEVEN_PATIENCE = 100.0
        compare("join-on-finding", "join", (0, 1), dump_on="warning", end_step=0)
        with a_fault_on_rank_1():
            compare("fault", "fsdp", (0, 1), enabled=False)
        meeting.PATIENCE = 1.0
        compare("only-0", "ddp", (0,))
    else:
        meeting.PATIENCE = 1.0
        compare("only-1", "ddp", (1,))
        compare("only-1-of-shards", "fsdp", (1,))
    dist.destroy_process_group()
