"""Forks two ranks for every use of ours and every order of ending; each says what is left at last.

A rank ends as a script does, through the interpreter's own end. The hook that is registered first
runs last: it sees what is left when all that is ours has had its turn.
Arguments: a folder; then, for one case only, a use and an ending.
"""

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by FSDP at the latest: once here, not in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradsight
from core.threads import gloo_threads

USES = ["look", "dump", "watch ddp", "watch fsdp"]
ENDINGS = ["close destroy", "destroy close", "close", "destroy", ""]
RANK: int | None = None
CASE = ""


def say_what_is_left() -> None:
    if RANK is None:
        return
    from gradsight.core.group import open_groups

    left = [thread.name for thread in threading.enumerate() if "gradsight" in thread.name]
    if open_groups():
        left.append(f"{open_groups()} groups")
    # Training's own group keeps its threads until it is destroyed, and longer where the model that
    # uses it is still there.
    if gloo_threads() > 2:
        left.append(f"{gloo_threads() - 2} threads of gloo")
    os.write(1, f"{CASE} rank {RANK}: {', '.join(left) or 'nothing left'}\n".encode())


def train(use: str, run_dir: Path) -> Iterator[Any]:
    """A few steps, and what is to be closed after them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    if use.endswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if use == "dump":
        yield (dumper := gradsight.GradientDumper(run_dir))
    elif use.startswith("watch"):
        yield gradsight.watch(model, optimizer, run_dir=run_dir)
    for step in range(3):
        model(torch.ones(4, 8)).sum().backward()
        if use == "dump":
            dumper.dump(model, step)
        elif use == "look":
            gradsight.check_gradient_health(model, quiet=True)
        optimizer.step()
        optimizer.zero_grad()


def job(use: str, ending: str, folder: Path) -> None:
    """One rank's whole script."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=RANK, world_size=2)
    closable = list(train(use, folder / "run"))
    for act in ending.split():
        if act == "destroy":
            dist.destroy_process_group()
        for one in closable if act == "close" else ():
            one.close()


def in_two_ranks(case: tuple[str, str], folder: Path) -> bool:
    """Whether this is one of the ranks now; the parent waits for both and goes on."""
    global RANK, CASE
    CASE = " / ".join(case)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            RANK = rank
            return True
        children.append(child)
    for child in children:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            os.write(1, f"{CASE}: ended with {code}\n".encode())
    return False


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Before anything of ours that knows groups is imported: importing gradsight alone does not.
    assert "gradsight.core.group" not in sys.modules
    atexit.register(say_what_is_left)
    for name in gradsight.__all__:
        getattr(gradsight, name)
    cases = [(sys.argv[2], sys.argv[3])] if len(sys.argv) > 2 else product(USES, ENDINGS)
    for number, case in enumerate(cases):
        folder = Path(sys.argv[1]) / str(number)
        folder.mkdir()
        if in_two_ranks(case, folder):
            job(*case, folder)
            break
