"""How well the scores foretell what training does to the targets."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core.sharing import Ranks

UNSETTLED = 128
"""How many steps may wait on the device before they are read, all at once."""


@dataclass(frozen=True)
class Honesty:
    """Predicted and measured changes of one target's loss, from one refresh of its direction to the
    next.
    """

    target: str
    pairs: tuple[tuple[float, float], ...]
    """(predicted, measured); predicted is -lr * clip_coef * the sum of scores, with the optimizer's
    momentum, added up over the steps between.
    """

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
    """The sums of a step's scores by target, and what the optimizer did with its gradient."""

    step: int
    sums: Tensor | list[float]
    lr: float | None
    clip_coef: Tensor | float | None = None

    @property
    def clipped(self) -> float:
        """What clipping left of the gradient; 1 where that is not known."""
        coef = 1.0 if self.clip_coef is None else float(self.clip_coef)
        return coef if coef == coef else 1.0


@dataclass(frozen=True)
class Momentum:
    """How an optimizer mixes earlier gradients into a step: m = keep * m + take * g, in Adam
    corrected for its start at 0.
    """

    keep: float = 0.0
    take: float = 1.0
    corrected: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer | None) -> "Momentum":
        """That of an optimizer's first group; none where it is not known."""
        group = {} if optimizer is None else optimizer.param_groups[0]
        if "betas" in group:
            return cls(float(group["betas"][0]), 1 - float(group["betas"][0]), corrected=True)
        return cls(float(group.get("momentum") or 0.0), 1 - float(group.get("dampening") or 0.0))

    def applied(self, sums: Tensor) -> Tensor:
        """Each step's sums with those of the steps before, as the optimizer adds gradients up."""
        mixed, rows = torch.zeros_like(sums[0]), []
        for number, row in enumerate(sums, 1):
            mixed = self.keep * mixed + (self.take if number > 1 or self.corrected else 1.0) * row
            rows.append(mixed / (1 - self.keep**number) if self.corrected else mixed)
        return torch.stack(rows)


class Diary:
    """Target losses as measured and steps as predicted, of the last few thousand steps."""

    def __init__(self, targets: tuple[str, ...], momentum: Momentum, length: int = 4096) -> None:
        self.targets, self._momentum = targets, momentum
        self.steps: deque[StepSum] = deque(maxlen=length)
        self._losses: deque[tuple[int, Sequence[Tensor] | list[float]]] = deque(maxlen=length)
        self._waiting = 0

    def add_scores(self, step: int, sums: Tensor, lr: float | None) -> None:
        """Add a block's scores to its step."""
        if self.steps and self.steps[-1].step == step:
            before = self.steps[-1].sums
            self.steps[-1].sums = sums + (
                before if isinstance(before, Tensor) else sums.new_tensor(before)
            )
            self.steps[-1].lr = lr
            return
        self._waiting += 1
        if self._waiting > UNSETTLED:
            self._settle()
        self.steps.append(StepSum(step, sums, lr))

    def add_losses(self, step: int, losses: Sequence[Tensor]) -> None:
        """Every target's loss at the start of a step."""
        self._losses.append((step, losses))

    def honesty(self, ranks: Ranks) -> dict[str, Honesty]:
        """Pairs for every target; to be called on all processes alike."""
        self._settle()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in self.targets}
        if self.steps:
            sums = ranks.sum(torch.tensor([list(s.sums) for s in self.steps], dtype=torch.float64))
            clipped = sums * torch.tensor(
                [s.clipped for s in self.steps], dtype=torch.float64
            ).unsqueeze(1)
            rates = torch.tensor(
                [1.0 if s.lr is None else s.lr for s in self.steps], dtype=torch.float64
            )
            changes = -self._momentum.applied(clipped) * rates.unsqueeze(1)
            for (start, old), (end, new) in pairwise(self._losses):
                between = [i for i, s in enumerate(self.steps) if start <= s.step < end]
                for k, name in enumerate(self.targets if between else ()):
                    found[name].append(
                        (float(changes[between, k].sum()), float(new[k]) - float(old[k]))
                    )
        return {name: Honesty(name, tuple(pairs)) for name, pairs in found.items()}

    def _settle(self) -> None:
        """Read what waits on the device."""
        self._waiting = 0
        for entry in self.steps:
            if isinstance(entry.sums, Tensor):
                entry.sums = entry.sums.tolist()
                entry.clip_coef = None if entry.clip_coef is None else float(entry.clip_coef)
        self._losses = deque(
            ((step, [float(x) for x in losses]) for step, losses in self._losses),
            self._losses.maxlen,
        )
