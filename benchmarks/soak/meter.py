"""What opening a watch, a watched step, and writing cost in this process; one line of JSON.

Uses nothing but the front door, so that any revision can be measured by it.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import gradsight

OPENINGS, BLOCKS, STEPS, DUMPS = 7, 5, 100, 5


def made(width: int = 64, layers: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    rows = torch.ones(4, model[0].in_features)  # type: ignore[index, union-attr]
    for _ in range(count):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def opening(folder: Path) -> list[float]:
    model, optimizer = made()
    took = []
    for number in range(OPENINGS + 1):
        began = time.perf_counter()
        watched = gradsight.watch(model, optimizer, run_dir=folder / f"o{number}", quiet=True)
        took.append(time.perf_counter() - began)
        watched.close()
    return took[1:]  # the first one imports


def step_and_closing(folder: Path) -> tuple[list[float], list[float]]:
    model, optimizer = made()
    took, closing = [], []
    for number in range(3):
        with gradsight.watch(model, optimizer, run_dir=folder / f"s{number}", quiet=True):
            steps(model, optimizer, 50)
            for _ in range(BLOCKS):
                began = time.perf_counter()
                steps(model, optimizer, STEPS)
                took.append((time.perf_counter() - began) / STEPS)
            began = time.perf_counter()
        closing.append(time.perf_counter() - began)
    return took, closing


def dumping(folder: Path) -> list[float]:
    model, _ = made(width=512, layers=8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    took = []
    with gradsight.GradientDumper(folder / "d", asynchronous=False, keep_last=2) as dumper:
        for step in range(DUMPS + 1):
            began = time.perf_counter()
            dumper.dump(model, step)
            took.append(time.perf_counter() - began)
    return took[1:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        stepping, closing = step_and_closing(Path(place))
        measured = {
            "opening": opening(Path(place)),
            "a step": stepping,
            "writing the rest at close": closing,
            "writing a dump": dumping(Path(place)),
        }
    print(json.dumps({name: statistics.median(values) for name, values in measured.items()}))
