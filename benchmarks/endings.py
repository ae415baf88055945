"""Does a finished two-rank job end well? Many short ones beside a busy loop; prints the aborts.

    python benchmarks/endings.py --jobs 200

Each job trains a few steps with dumps, one look or a watch, under DDP or FSDP2, and ends in one of
five orders of closing ours, destroying training's group, and just ending. The ranks are forked from
a process that has imported everything and end as a script does. An abort is an end by SIGABRT after
the last line: what torchrun calls a failed training.
"""

import argparse
import collections
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradsight

USES = ["dump", "sampled dump", "one look", "look at every step", "watch", "watch with dumps"]
WAYS = ["ddp", "fsdp"]
ENDINGS = ["close destroy", "destroy close", "close", "destroy", "just end"]
STEPS = 5
PATIENCE = 60.0


def train(use: str, way: str, run_dir: Path) -> Any:
    """A few steps; returns what is to be closed."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ours: Any = None
    if use.endswith(("dump", "dumps")):
        ours = gradsight.GradientDumper(run_dir, save_first_n=2 if "sampled" in use else None)
    if use.startswith("watch"):
        ours = gradsight.watch(model, optimizer, run_dir=run_dir, dump=ours)
    for step in range(STEPS):
        model(torch.randn(8, 32)).square().mean().backward()
        if use.endswith("dump"):
            ours.dump(model, step)
        elif use == "look at every step" or (use == "one look" and step == STEPS - 1):
            gradsight.check_gradient_health(model)
        optimizer.step()
        optimizer.zero_grad()
    return ours


def script(rank: int, use: str, way: str, ending: str, folder: Path) -> None:
    """The whole of one rank."""
    warnings.simplefilter("ignore")
    silence = os.open(folder / f"said{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(silence, 2)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    ours = train(use, way, folder / "run")
    for act in ending.split():
        if act == "destroy":
            dist.destroy_process_group()
        elif act == "close" and ours is not None:
            ours.close()


def outcome(children: list[int]) -> list[str]:
    """How the ranks ended; one that does not end is ended."""
    until = time.monotonic() + PATIENCE
    endings = []
    for child in children:
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() < until:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            endings.append("did not end")
        elif os.waitstatus_to_exitcode(status) == -signal.SIGABRT:
            endings.append("aborted")
        elif status:
            endings.append("failed")
    return endings


def start(case: tuple[str, str, str], folder: Path) -> list[int] | None:
    """Fork the ranks; None in a rank that has run its script and is to end."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            script(rank, *case, folder)
            return None
        children.append(child)
    return children


def main(jobs: int, busy: int) -> None:
    """Run the jobs one after the other."""
    torch.set_num_threads(1)
    # Ended from outside, it still ends its busy loops.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in gradsight.__all__:
        getattr(gradsight, name)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    counts: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    cases = itertools.cycle(itertools.product(USES, WAYS, ENDINGS))
    try:
        for case in itertools.islice(cases, jobs):
            folder = Path(tempfile.mkdtemp(prefix="ending"))
            children = start(case, folder)
            if children is None:
                loops = []  # the parent's
                return
            counts["jobs"] += 1
            for word in set(outcome(children)):
                counts[word] += 1
                said = [(folder / f"said{rank}").read_text()[-300:] for rank in range(2)]
                print(" / ".join(case), word, *said, flush=True)
            if counts["jobs"] % 20 == 0:
                print(f"{counts['jobs']} jobs, {counts['aborted']} aborted", flush=True)
            subprocess.run(["rm", "-rf", str(folder)], check=True)
    finally:
        for loop in loops:
            loop.kill()
    took = time.monotonic() - began
    bad = {word: counts[word] for word in ("aborted", "failed", "did not end")}
    print(f"{counts['jobs']} jobs in {took:.0f} s beside {busy} busy loops: {bad}")
    promise = "a finished job of two ranks ends well, in any order of endings"
    failures = sum(bad.values())
    print(json.dumps({"promise": promise, "tries": counts["jobs"], "failures": failures}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--busy", type=int, default=1)
    options = parser.parse_args()
    main(options.jobs, options.busy)
