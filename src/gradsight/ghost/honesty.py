"""How well the scores foretell what training does to the targets."""

import itertools
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsight.ghost.ranks import Ranks


@dataclass(frozen=True)
class Honesty:
    """Predicted and measured changes of one target's loss, from one refresh of its direction to the next."""

    target: str
    pairs: tuple[tuple[float, float], ...]
    """(predicted, measured); predicted is -lr * clip_coef * the sum of scores, added up over the steps between."""

    @property
    def correlation(self) -> float:
        """Pearson's correlation of the pairs; NaN for fewer than three."""
        if len(self.pairs) < 3:
            return float("nan")
        table = torch.tensor(self.pairs, dtype=torch.float64)
        table = table - table.mean(0)
        return float((table[:, 0] * table[:, 1]).sum() / (table[:, 0].norm() * table[:, 1].norm()))


@dataclass
class StepSum:
    """What one optimizer step is predicted to do, to first order."""

    step: int
    sums: Tensor
    lr: float | None
    clip_coef: Tensor | None = None


class Diary:
    """Target losses as measured and steps as predicted, of the last few thousand steps."""

    def __init__(self, targets: tuple[str, ...], length: int = 4096) -> None:
        self.targets = targets
        self.steps: deque[StepSum] = deque(maxlen=length)
        self.losses: deque[tuple[int, list[Tensor]]] = deque(maxlen=length)

    def add_scores(self, step: int, sums: Tensor, lr: float | None) -> None:
        """Add a block's scores to its step."""
        if self.steps and self.steps[-1].step == step:
            self.steps[-1].sums = self.steps[-1].sums + sums
            self.steps[-1].lr = lr
        else:
            self.steps.append(StepSum(step, sums, lr))

    def honesty(self, ranks: Ranks) -> dict[str, Honesty]:
        """Pairs for every target; steps without a known learning rate count with 1."""
        if not self.steps:
            return {name: Honesty(name, ()) for name in self.targets}
        sums = ranks.sum(torch.stack([s.sums for s in self.steps])).cpu()
        factors = [(1.0 if s.lr is None else s.lr) * _known(s.clip_coef) for s in self.steps]
        changes = -sums.double() * torch.tensor(factors, dtype=torch.float64).unsqueeze(1)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in self.targets}
        measured = list(self.losses)
        for (start, old), (end, new) in itertools.pairwise(measured):
            between = [i for i, s in enumerate(self.steps) if start <= s.step < end]
            if not between:
                continue
            for k, name in enumerate(self.targets):
                found[name].append((float(changes[between, k].sum()), float(new[k] - old[k])))
        return {name: Honesty(name, tuple(pairs)) for name, pairs in found.items()}


def _known(coef: Tensor | None) -> float:
    value = 1.0 if coef is None else float(coef)
    return value if value == value else 1.0
