"""Makes the few runs that the contract is read from, through the public API only."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradsight

STEPS = 12
NAN_STEP = 6
BUILD = """
import itertools
import torch
from torch import nn

calls = itertools.count(1)

def learns(batch_size=256):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(64, 4))
    x = torch.randn(batch_size, 64)
    return model, (x, x[:, :4].argmax(1)), loss

def probabilities():
    model, batch, _ = learns()
    return nn.Sequential(model, nn.Softmax(-1)), batch, loss

def counts_calls():
    model, batch, _ = learns()
    model[0][1].register_forward_hook(lambda module, args, output: output * next(calls))
    return model, batch, loss

def again():
    model = Classifier()
    return model, (torch.randn(16, 8), torch.zeros(16, dtype=torch.long)), loss

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def fails():
    raise RuntimeError("the build function failed")

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
SCRIPT = """
import sys
kind = sys.argv[1]
if kind == "fails":
    raise RuntimeError("the script failed")
if kind == "exits with 7":
    sys.exit(7)
if kind == "does not train":
    sys.exit()
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(64, 8)
    if kind == "diverges" and step == 3:
        x[0] = float("nan")
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), x[:, :2].argmax(1)).backward()
    optimizer.step()
"""


class Classifier(nn.Module):
    """A model with enough parameters for blocks, and a layer without gradient on request."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        if unused:
            self.unused = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    inputs = [torch.randn(16, 8) for _ in range(count)]
    return [(x, x[:, :4].argmax(1)) for x in inputs]


def train(model: nn.Module, run_dir: Path, steps: int = STEPS, **options: Any) -> None:
    """Train with a watch and nothing else."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True, **options) as watched:
        for batch in batches(steps):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            watched.log(loss=loss)


def train_with_every_instrument(run_dir: Path) -> dict[str, Any]:
    """Train with watch, recorder, dumps, scores, memory and a NaN; return the public objects."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(STEPS)
    data[NAN_STEP][0][3, 2] = float("nan")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dumper = gradsight.GradientDumper(run_dir, step_interval=4, save_first_n=2, dump_on="critical")
    full = gradsight.GradientDumper(run_dir, start_step=5, end_step=5)
    monitor = gradsight.MemoryMonitor()
    engine = gradsight.GhostEngine(
        model, loss_fn, batches(STEPS + 1)[-1], optimizer=optimizer, run_dir=run_dir
    )
    tracker = gradsight.MetricsTracker(run_dir, use_tensorboard=False)
    watched = gradsight.watch(
        model,
        optimizer,
        run_dir=run_dir,
        histograms=gradsight.Schedule(step_interval=4),
        recorder="batch",
        dump=dumper,
        quiet=True,
        on_finding={"GS103": "skip"},
    )
    with watched, dumper, full, tracker, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            ids = list(range(16 * step, 16 * step + 16))
            with engine.observe(sample_ids=ids, domains=["even", "odd"] * 8, step=step):
                loss = loss_fn(model, batch)
                loss.backward()
            full.dump(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            watched.log(loss=loss)
            monitor.sample(watched, step)
            if step == NAN_STEP:
                model.load_state_dict(before)
        engine.close()
    return {type(each).__name__: each for each in (watched, engine, dumper, tracker, monitor)}


def damaged_copy(run: Path, folder: Path) -> Path:
    """Copy a run and change one byte of each file that is not text."""
    shutil.copytree(run, folder)
    text = (".json", ".md", ".html", ".svg")
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix not in text:
            data = bytearray(file.read_bytes())
            # At the end of a safetensors file are numbers, in its middle may be padding.
            data[-1 if file.suffix == ".safetensors" else len(data) // 2] ^= 0xFF
            file.write_bytes(data)
    return folder
