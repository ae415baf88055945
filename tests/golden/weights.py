"""Training runs with and without Gradsight, for a comparison of the final weights bit by bit.

Hashes of weights differ between processors, so none are stored: both runs are made and compared.
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gradsight
from session import loops

Weights = list[Tensor]
STEPS = 12


class UncheckedCase(loops.Case):
    """A case without the comparison with plain autograd."""

    def expect(self, *args: Any, **options: Any) -> None:
        self.expected.append({})


@contextlib.contextmanager
def unwatched(model: nn.Module, optimizers: Any) -> Iterator[None]:
    yield None


def loop_weights(loop: Callable[[loops.Case], None], with_gradsight: bool) -> Weights:
    """Train a loop of tests/session/loops.py, with every instrument of the watch if watched."""
    with tempfile.TemporaryDirectory() as run_dir:

        def watched(model: nn.Module, optimizers: Any) -> Any:
            dumper = gradsight.GradientDumper(run_dir, step_interval=5)
            every = gradsight.Schedule(step_interval=3)
            return gradsight.watch(
                model, optimizers, run_dir=run_dir, histograms=every, dump=dumper, quiet=True
            )

        case = UncheckedCase(watched if with_gradsight else unwatched)
        loop(case)
    return case.weights


def blocks() -> nn.Module:
    """Build a model of blocks with dropout, so that random numbers count, too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randn(6, 5, 16, generator=generator)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.roll(1, -1)).square().mean()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, around: Any = None) -> Weights:
    """Train on all batches and return the weights; `around` makes a context for each backward."""
    torch.manual_seed(1)
    for batch in batches():
        with around() if around else contextlib.nullcontext():
            mean_square(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def watched_weights(with_gradsight: bool) -> Weights:
    """Train with dropout, so that a random number drawn by Gradsight would change the weights."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not with_gradsight:
        return fit(model, optimizer)
    with gradsight.watch(model, optimizer, quiet=True):
        return fit(model, optimizer)


def ghost_weights(with_gradsight: bool) -> Weights:
    """Train with samples scored in every step, and with the exact gradient of plain training."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not with_gradsight:
        return fit(model, optimizer)
    validation = torch.ones(2, 5, 16)
    engine = gradsight.GhostEngine(model, mean_square, validation, exact_grad=True)
    try:
        return fit(model, optimizer, engine.observe)
    finally:
        engine.close()


def checkpointed_weights(policy: str, with_gradsight: bool) -> Weights:
    """Train with activation checkpointing."""
    model = blocks()
    if with_gradsight:
        gradsight.apply_checkpointing(model, policy)
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def sha256(weight: Tensor) -> str:
    """Return the hash of a weight's bytes."""
    return hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()


LOOPS = [*loops.TRUTHFUL, *loops.CHANGED]
RUNS: dict[str, Callable[[bool], Weights]] = {
    **{loop.__name__: partial(loop_weights, loop) for loop in LOOPS},
    "watch with dropout": watched_weights,
    "ghost with the exact gradient": ghost_weights,
    "checkpointing, full": partial(checkpointed_weights, "full"),
    "checkpointing, selective": partial(checkpointed_weights, "selective"),
}
