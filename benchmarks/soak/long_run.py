"""20,000 steps, and watches opened and closed again and again: what is left of them.

    python benchmarks/soak/long_run.py --scale 1

Memory may grow in the first half, while caches and rings fill up; in the second it may not. At the
end the process has the threads, descriptors and hooks that it had.
"""

import argparse
import os
import tempfile
import threading
from pathlib import Path

import torch
from forks import import_everything, tell
from torch import nn

import gradsight

STEPS = 20_000
OPENED = 100
GROWTH = 4.0
"""Megabytes by which the second half may be larger: two pages of the allocator's, no leak."""


def megabytes() -> float:
    """Memory that is the process's own now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Everything that somebody has hung onto the model and its optimizer."""
    kept: list[object] = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ]
    for module in model.modules():
        kept += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    return sum(len(each) for each in kept)  # type: ignore[arg-type]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def long_run(folder: Path, count: int) -> int:
    """How many of the three limits were broken."""
    model, optimizer = made()
    steps(model, optimizer, 100)
    before = (threading.active_count(), descriptors(), hooks(model, optimizer))
    with gradsight.watch(model, optimizer, run_dir=folder / "long", quiet=True) as watched:
        steps(model, optimizer, count // 2)
        watched.report()
        half = megabytes()
        steps(model, optimizer, count - count // 2)
        watched.report()
        growth = megabytes() - half
    after = (threading.active_count(), descriptors(), hooks(model, optimizer))
    recorded = sum(1 for _ in gradsight.open_run(folder / "long").steps())
    print(f"{recorded} steps, second half +{growth:.1f} MB, threads, descriptors, hooks: {after}")
    return (recorded != count) + (growth > GROWTH) + (after != before)


def opened_and_closed(folder: Path, count: int) -> int:
    model, optimizer = made()
    failures = 0
    before: tuple[int, int, int] | None = None
    for number in range(count):
        with gradsight.watch(model, optimizer, run_dir=folder / f"run{number}", quiet=True):
            steps(model, optimizer, 2)
        now = (threading.active_count(), descriptors(), hooks(model, optimizer))
        # The first one opens what the process keeps for good.
        if before is not None and now != before:
            failures += 1
            print(f"after {number + 1} watches: {now}, before {before}")
        before = now
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    import_everything()
    with tempfile.TemporaryDirectory() as place:
        count = max(200, round(STEPS * options.scale))
        tell(f"{count:,} steps leave nothing behind", 3, long_run(Path(place), count))
        count = max(3, round(OPENED * options.scale))
        found = opened_and_closed(Path(place), count)
        tell("watches that are closed leave nothing behind", count, found)
