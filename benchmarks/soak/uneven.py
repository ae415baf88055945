"""Ranks that do not do the same: a job of two must end with us as it ends without us.

    python benchmarks/soak/uneven.py

Only one rank opens a watch, one opens late, one makes fewer steps (Join), dies, raises, sleeps, has
no gradient. Each scenario is run with and without us: the ranks must end alike.
"""

import argparse
import os
import shutil
import signal
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by FSDP at the latest: once here, not in every rank
import torch.distributed as dist
from forks import HANGS, ended, import_everything, start, tell
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard

import gradsight

STEPS = 8
TIMEOUT = timedelta(seconds=40)
"""Of the user's own group: beyond the patience of ours."""
SCENARIOS = {
    "only rank 0 opens a watch": ("ddp", (0,), ""),
    "only rank 1 opens a watch": ("ddp", (1,), ""),
    "only rank 0 opens a watch, sharded": ("fsdp", (0,), ""),
    "rank 1 opens 3 s later": ("ddp", (0, 1), "late"),
    "uneven steps under Join": ("join", (0, 1), ""),
    "one NaN": ("ddp", (0, 1), "nan"),
    "one NaN, sharded": ("fsdp", (0, 1), "nan"),
    "rank 1 raises": ("ddp", (0, 1), "raise"),
    "rank 1 raises, sharded": ("fsdp", (0, 1), "raise"),
    "rank 1 dies": ("ddp", (0, 1), "die"),
    "rank 1 dies, sharded": ("fsdp", (0, 1), "die"),
    "rank 1 sleeps": ("ddp", (0, 1), "sleep"),
    "rank 1 exits early": ("ddp", (0, 1), "exit"),
}
DUMPS: dict[str, dict[str, Any] | None] = {
    "no dumps": None,
    "dumps": {},
    "sampled dumps, waited for": {"save_first_n": 2, "asynchronous": False},
}


def job(rank: int, scenario: str, dumps: dict[str, Any] | None, ours: bool, folder: Path) -> None:
    """The whole script of one rank."""
    way, watching, fault = SCENARIOS[scenario]
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=TIMEOUT)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model = fully_shard(model) if way == "fsdp" else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    closable: list[Any] = []
    if ours and rank in watching:
        if fault == "late" and rank == 1:
            time.sleep(3.0)
        dumper = None
        if dumps is not None:
            dumper = gradsight.GradientDumper(folder / "run", **dumps)
            closable.append(dumper)
        closable.insert(0, gradsight.watch(model, optimizer, run_dir=folder / "run", dump=dumper))
    steps = STEPS + (5 if way == "join" and rank == 0 else 0)
    with Join([model]) if way == "join" else nullcontext():
        for step in range(steps):
            if step == STEPS // 2 and rank == 1:
                stumble(fault)
            factor = float("nan") if fault == "nan" and step == 3 and rank == 1 else 1.0
            (model(torch.randn(4, 8)) * factor).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for each in closable:
        each.close()
    dist.barrier()
    dist.destroy_process_group()


def stumble(fault: str) -> None:
    if fault == "raise":
        raise RuntimeError("a fault of the user's")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sleep":
        time.sleep(3.0)
    if fault == "exit":
        raise SystemExit(7)


def codes(scenario: str, dumps: dict[str, Any] | None, ours: bool) -> tuple[list[int], str]:
    """How the two ranks ended, and what they said."""
    folder = Path(tempfile.mkdtemp(prefix="ranks"))
    said = folder / "said"
    children = [
        start(lambda rank=rank: job(rank, scenario, dumps, ours, folder), said)  # type: ignore[misc]
        for rank in range(2)
    ]
    found = [ended(child, patience=90.0) for child in children]
    text = said.read_text()
    shutil.rmtree(folder)
    return found, text


def main(scale: float) -> None:
    tries = failures = 0
    chosen = list(SCENARIOS)
    for scenario in chosen[: max(1, round(len(chosen) * min(1.0, scale)))]:
        alone, _ = codes(scenario, None, ours=False)
        if HANGS in alone:
            # Once in some hundred jobs gloo itself does not end: that is nothing to compare with.
            alone, _ = codes(scenario, None, ours=False)
        lonely = len(SCENARIOS[scenario][1]) == 1
        for name, dumps in DUMPS.items():
            if lonely and name.startswith("sampled"):
                continue  # each of them takes the whole patience of a meeting
            tries += 1
            found, text = codes(scenario, dumps, ours=True)
            good = found == alone and HANGS not in found
            if lonely:
                missing = 1 - SCENARIOS[scenario][1][0]
                good = good and f"but rank {missing} of 2 did not come" in text
            print(f"{scenario}, {name}: {found}, without us {alone}", flush=True)
            if not good:
                failures += 1
                print(text[-2000:], flush=True)
    tell("ranks that do not do the same end as they do without us", tries, failures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    import_everything()
    main(options.scale)
