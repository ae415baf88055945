"""Findings do not depend on where the checked steps are cut into chunks.

`Watch.report` checks every step up to now, so each call of it ends a chunk. A recorded sequence of
gradients is trained on once without such calls, and then with calls at random places: also between
`backward` and the optimizer's step, and twice in the same step.
"""

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsight

STEPS = 130
LAYERS = 4
SPIKE, NAN = 60, 75
LEARNING_RATE = 1e-3
Norms = np.ndarray[Any, Any]
"""Gradient norms, [steps, layers]."""
Losses = list[float]


class Stack(nn.Module):
    """Layers whose gradients are chosen: the loss is a weighted sum of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(LAYERS))

    def forward(self, gradients: Tensor) -> Tensor:
        parts = [
            (layer.weight * gradient).sum()
            for layer, gradient in zip(self.layers, gradients, strict=True)
        ]
        return torch.stack(parts).sum()


def ordinary(seed: int) -> Norms:
    """Return norms near 1 that vary by a tenth from step to step."""
    return np.exp(np.random.default_rng(seed).normal(scale=0.1, size=(STEPS, LAYERS)))


def falling_loss() -> Losses:
    return [2.0 * 0.98**step + 0.1 for step in range(STEPS)]


def nothing_wrong(norms: Norms, losses: Losses) -> None:
    """Leave everything as it is."""


def spikes(norms: Norms, losses: Losses) -> None:
    """One spike in all layers, then two in one layer."""
    norms[SPIKE] *= 100
    norms[[SPIKE + 20, SPIKE + 40], 2] *= 300


def nan_in_two_steps(norms: Norms, losses: Losses) -> None:
    """A spike, NaN in two steps, infinity in a later one."""
    norms[SPIKE] *= 100
    norms[NAN : NAN + 2, 1:] = np.nan
    norms[NAN + 21, 3] = np.inf


def nan_to_the_end(norms: Norms, losses: Losses) -> None:
    norms[NAN:] = np.nan
    losses[NAN:] = [float("nan")] * (STEPS - NAN)


def vanishing(norms: Norms, losses: Losses) -> None:
    """The first layers fade away."""
    norms[:, :2] *= np.exp(-np.arange(STEPS) / 4)[:, None]


def exploding(norms: Norms, losses: Losses) -> None:
    """All layers grow, and the loss with them."""
    norms *= np.exp(np.maximum(0, np.arange(STEPS) - 40) / 8)[:, None]
    losses[40:] = [0.9 * 1.1**step for step in range(STEPS - 40)]


def dead_layer(norms: Norms, losses: Losses) -> None:
    """A layer gets zeros only."""
    norms[:, 1] = 0


def alternating(norms: Norms, losses: Losses) -> None:
    """Too large for three steps of every seven."""
    norms[[step for step in range(STEPS) if step % 7 < 3]] *= 60


def random_events(seed: int) -> Callable[[Norms, Losses], None]:
    """Return a fault made of five random events."""

    def change(norms: Norms, losses: Losses) -> None:
        draw = np.random.default_rng(seed)
        for factor in draw.choice([30, 1e3, 1e-6, 0, np.nan], size=5):
            start, length = draw.integers(STEPS), draw.choice([1, 2, 3, 15])
            layers = draw.random(LAYERS) < 0.6
            norms[start : start + length, layers] *= factor

    return change


SEQUENCES: dict[str, tuple[Callable[[Norms, Losses], None], set[str]]] = {
    # name: what happens, codes that must be among the findings
    "nothing wrong": (nothing_wrong, set()),
    "spikes": (spikes, {"GS201"}),
    "NaN in two steps": (nan_in_two_steps, {"GS103", "GS104", "GS201"}),
    "NaN to the end": (nan_to_the_end, {"GS103", "GS407"}),
    "vanishing": (vanishing, {"GS203", "GS204"}),
    "exploding": (exploding, {"GS101", "GS102"}),
    "dead layer": (dead_layer, {"GS301"}),
    "alternating": (alternating, {"GS201"}),
    **{f"random events {seed}": (random_events(seed), {"GS201"}) for seed in range(4)},
}
CUTS = 20


def findings(name: str, run_dir: Path, cuts: set[float]) -> list[dict[str, Any]]:
    """Train on a sequence and return every field of its findings, also as the record has them.

    A cut at 7 ends a chunk after step 7, a cut at 6.5 within step 7, before the optimizer's step.
    """
    torch.manual_seed(0)
    change, _ = SEQUENCES[name]
    norms, losses = ordinary(1), falling_loss()
    change(norms, losses)
    model = Stack().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    directions = torch.randn(STEPS, LAYERS, 3, 3, dtype=torch.double)
    directions /= directions.flatten(2).norm(dim=2)[..., None, None]
    gradients = directions * torch.from_numpy(norms)[..., None, None]
    with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True) as watched:
        for step in range(STEPS):
            model(gradients[step]).backward()
            if step - 0.5 in cuts:
                watched.report()
            # The weights must stay finite: the gradients are chosen, not computed from them.
            with torch.no_grad():
                bad = not gradients[step].isfinite().all()
                optimizer.param_groups[0]["lr"] = 0.0 if bad else LEARNING_RATE
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=losses[step])
            if step in cuts:
                watched.report()
                watched.report()
    reported = watched.report().findings
    recorded = gradsight.open_run(run_dir).findings()
    found = [asdict(each) for each in (*reported, *recorded)]
    for finding in found:
        if finding["diagnosis"]:
            del finding["diagnosis"]["seconds"]
    return found


@pytest.mark.parametrize("name", SEQUENCES)
def test_cutting_a_run_into_chunks_changes_no_finding(name: str, tmp_path: Path) -> None:
    _, codes = SEQUENCES[name]
    in_one = findings(name, tmp_path / "one", set())
    assert codes <= {finding["code"] for finding in in_one}
    draw = random.Random(name)
    few = {step - draw.choice([0, 0.5]) for step in draw.sample(range(STEPS), CUTS)}
    every_step = {float(step) for step in range(STEPS)}
    for number, cuts in enumerate((few, every_step)):
        assert findings(name, tmp_path / str(number), cuts) == in_one, f"cut after {sorted(cuts)}"
