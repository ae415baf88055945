"""Bad steps for the table of what is found where numbers come late."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradsight
from device.tensors import THE_DEVICE, moved, peek

STEPS, BAD, ROW = 18, 14, 5
NAMES = [f"sample-{number}" for number in range(8)]


class Length(nn.Module):
    """At a row of zeros sqrt's derivative is not finite, though its value is; log's value is not."""

    def __init__(self, born: str) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6, bias=False)
        self.born = born

    def forward(self, x: Tensor) -> Tensor:
        squares = self.proj(x).pow(2).sum(1, keepdim=True)
        if self.born == "backward":
            return squares.sqrt()  # the guilty line of backward
        if self.born == "forward":
            return torch.log(squares)  # the guilty line of forward
        return squares


class Net(nn.Module):
    """A clean path and a faulty one, joined by a head."""

    def __init__(self, born: str, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.length = Length(born)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.head(torch.cat([self.drop(h), self.length(h)], 1))
        return out


class Outcome:
    """What a run left behind."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.weights: list[Tensor] = []
        self.around: list[list[Tensor]] = []
        """Weights and optimizer state before and after the bad update."""
        self.generators: list[Tensor] = []
        self.drains: list[Any] = []

    @property
    def run(self) -> Any:
        return gradsight.open_run(self.run_dir)

    def finding(self) -> Any:
        """The critical one, or the spike."""
        found = [each for each in self.run.findings() if each.code in ("GS103", "GS104", "GS201")]
        return found[0]


def train(
    born: str,
    device: torch.device,
    run_dir: Path,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    dropout: float = 0.1,
    **watch: Any,
) -> Outcome:
    """Train with one bad step, under a watch unless that is None."""
    torch.manual_seed(0)
    THE_DEVICE.generators.seed(0)
    model = moved(Net(born, dropout), device)
    made = optimizer(list(model.parameters()))
    data = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1))
    data[BAD, ROW] = 300.0 if born == "spike" else 0.0
    batches = data.to(device).unbind()
    outcome = Outcome(run_dir)
    watched = None
    if watch.pop("watched", True):
        watched = gradsight.watch(model, made, run_dir=run_dir, quiet=True, **watch)
    for step, batch in enumerate(batches):
        THE_DEVICE.clock.take()
        if watched is not None:
            watched.ids(NAMES)
        loss = model(batch).pow(2).mean()
        loss.backward()
        if step == BAD:
            outcome.around.append(everything(model, made))
        made.step()
        if step == BAD:
            outcome.around.append(everything(model, made))
        made.zero_grad()
        if 5 <= step < BAD:
            outcome.drains += [each for each in THE_DEVICE.clock.take()[0] if each.drains]
    if watched is not None:
        watched.close()
    outcome.weights = everything(model, made)
    outcome.generators = [torch.get_rng_state(), *THE_DEVICE.generators.states]
    return outcome


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and optimizer state as they are now; no wait of anybody's."""
    state = [
        value
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, Tensor)
    ]
    return [peek(each) for each in [*model.parameters(), *state]]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit, NaN included."""
    pairs = zip(one, other, strict=True)
    return len(one) == len(other) and all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32) if tensor.dtype is torch.float32 else tensor
