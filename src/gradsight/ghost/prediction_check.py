"""How well the scores foretell what training does to the targets' losses."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core.devices import is_accelerator
from gradsight.core.sharing import ModelGroup
from gradsight.ghost.gradients import dot
from gradsight.ghost.targets import Targets
from gradsight.measure.clipping import ClipReading
from gradsight.measure.host_copy import HostCopy

UNSETTLED = 128
"""How many steps may wait on the device before they are read, all at once."""


@dataclass(frozen=True)
class PredictionCheck:
    """Predicted and measured changes of one target's loss, between refreshes of its direction."""

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
    sums: list[HostCopy] | list[float]
    """By target; as long as they are on their way, by block."""
    lr: float | HostCopy | None
    clip: ClipReading | None = None
    """Until it is read."""
    clip_coef: float = 1.0
    """What clipping left of the gradient; 1 where that is not known."""
    carried: "HostCopy | Carried | None" = None
    """What earlier gradients still do in this step, where it was looked at."""


@dataclass(frozen=True, slots=True)
class Momentum:
    """How an optimizer mixes earlier gradients into a step: m = keep * m + take * g.

    Sums of earlier steps stand in for what their gradients still do: each along the direction of
    its own step, which has turned since. `CarriedMoment` looks instead.
    """

    keep: float = 0.0
    take: float = 1.0
    corrected: bool = False
    """Whether m is corrected for its start at 0, as in Adam."""

    @classmethod
    def of(cls, optimizer: Optimizer | None) -> "Momentum":
        """That of an optimizer's first group; none where it is not known."""
        if optimizer is None:
            return cls()
        group = optimizer.param_groups[0]
        if "betas" in group:
            beta1 = float(group["betas"][0])
            return cls(beta1, 1 - beta1, corrected=True)
        return cls(float(group.get("momentum") or 0.0), 1 - float(group.get("dampening") or 0.0))

    def applied(self, sums: Tensor) -> Tensor:
        """Each step's sums with those of the steps before, as the optimizer adds gradients up."""
        mixed = torch.zeros_like(sums[0])
        rows = []
        for number, row in enumerate(sums, 1):
            take = self.take
            if number == 1 and not self.corrected:
                take = 1.0  # SGD takes its first gradient whole, whatever the dampening
            mixed = self.keep * mixed + take * row
            rows.append(mixed)
        if self.corrected:
            rows = [row / (1 - self.keep**number) for number, row in enumerate(rows, 1)]
        return torch.stack(rows)


@dataclass(frozen=True)
class Carried:
    """<direction, m> by target, with the first moment m from before a step."""

    dots: list[float]
    steps: float
    """How many steps the optimizer had made."""


class CarriedMoment:
    """What the optimizer's first moment does along the present directions.

    Adam moves by (1 - beta1) g + beta1 m. Of that, scores know g; m is nine tenths. On a small GPT
    the correlation of Adam-aware predictions with what happened was 0.02 where sums of scores along
    older directions stood in for m, and 0.98 with m itself.
    """

    def __init__(
        self, targets: Targets, optimizer: Optimizer, parameters: Mapping[str, Tensor]
    ) -> None:
        self._targets = targets
        self._optimizer = optimizer
        self._parameters = parameters

    def look(self) -> HostCopy | None:
        """Before a step, what becomes a `Carried`, on its way: the dots, then the count of steps.

        None where no direction or no m is kept.
        """
        directions = self._targets.directions
        moments = {name: self._state(name).get("exp_avg") for name in self._parameters}
        known = {name: moment for name, moment in moments.items() if moment is not None}
        if not known or len(directions) < len(self._targets.names):
            return None
        dots = []
        for target in self._targets.names:
            direction = directions[target]
            parts = [dot(direction[name], known[name]) for name in known if name in direction]
            dots.append(torch.stack(parts).sum() if parts else torch.zeros(()))
        together = torch.stack(dots)
        steps = self._state(next(iter(known)))["step"]
        if isinstance(steps, Tensor) and is_accelerator(steps.device):
            steps = steps.to(together).reshape(1)
        else:
            # Filled, not copied there: a copy from the host would wait.
            steps = together.new_full((1,), float(steps))
        return HostCopy.of(torch.cat([together, steps]))

    def _state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(self._parameters[name], {})
        return state


class LossHistory:
    """Target losses as measured and steps as predicted, of the last few thousand steps."""

    def __init__(
        self,
        targets: tuple[str, ...],
        momentum: Momentum,
        carried: CarriedMoment | None = None,
        length: int = 4096,
    ) -> None:
        self.targets = targets
        self._carried = carried
        self.steps: deque[StepSum] = deque(maxlen=length)
        self._momentum = momentum
        self._losses: deque[tuple[int, HostCopy | list[float]]] = deque(maxlen=length)
        self._waiting = 0

    def add_scores(self, step: int, sums: Tensor, lr: float | HostCopy | None) -> None:
        """Add a block's scores to its step."""
        copy = HostCopy.of(sums.detach())
        last = self.steps[-1] if self.steps else None
        if last is not None and last.step == step:
            before = [each for each in last.sums if isinstance(each, HostCopy)]
            if len(before) < len(last.sums):  # it is read already
                before = [HostCopy.of(torch.tensor(last.sums, dtype=torch.float64, device="cpu"))]
            last.sums = [*before, copy]
            last.lr = lr
            return
        self._waiting += 1
        if self._waiting > UNSETTLED:
            self._settle()
        self.steps.append(StepSum(step, [copy], lr))

    def add_losses(self, step: int, losses: Sequence[Tensor]) -> None:
        """Every target's loss at the start of a step."""
        stacked = torch.stack([each.detach().reshape(()) for each in losses])
        self._losses.append((step, HostCopy.of(stacked)))

    def before_step(self, clip: ClipReading | None) -> None:
        """The optimizer is about to use the gradient of the last step."""
        if not self.steps:
            return
        self.steps[-1].clip = clip
        if self._carried is not None:
            self.steps[-1].carried = self._carried.look()

    def checks(self, group: ModelGroup) -> dict[str, PredictionCheck]:
        """The check of every target; to be called on all processes alike."""
        self._settle()
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in self.targets}
        if self.steps:
            changes = self._predicted_changes(group)
            losses = [(step, each) for step, each in self._losses if isinstance(each, list)]
            for (start, old), (end, new) in pairwise(losses):
                between = [i for i, s in enumerate(self.steps) if start <= s.step < end]
                if not between:
                    continue
                for k, name in enumerate(self.targets):
                    predicted = float(changes[between, k].sum())
                    pairs[name].append((predicted, new[k] - old[k]))
        return {name: PredictionCheck(name, tuple(each)) for name, each in pairs.items()}

    def _predicted_changes(self, group: ModelGroup) -> Tensor:
        """The change of every target's loss by step: [steps, targets]."""
        sums = group.sum(torch.tensor([list(s.sums) for s in self.steps], dtype=torch.float64))
        coefs = torch.tensor([s.clip_coef for s in self.steps], dtype=torch.float64)
        rates = [s.lr if isinstance(s.lr, float) else 1.0 for s in self.steps]
        used = sums * coefs.unsqueeze(1)
        moved = self._momentum.applied(used)
        looked = self._looked_at(used, group)
        moved = torch.where(looked.isnan(), moved, looked)
        return -moved * torch.tensor(rates, dtype=torch.float64).unsqueeze(1)

    def _looked_at(self, used: Tensor, group: ModelGroup) -> Tensor:
        """Each step's sums with the first moment that was looked at; NaN where it was not."""
        nothing = [math.nan] * len(self.targets)
        seen = [s.carried if isinstance(s.carried, Carried) else None for s in self.steps]
        rows = [nothing if each is None else each.dots for each in seen]
        carried = torch.tensor(rows, dtype=torch.float64)
        if group.sharded:  # each process has looked at its own part
            carried = group.sum(carried)
        made = [0.0 if each is None else each.steps for each in seen]
        keep = self._momentum.keep
        mixed = keep * carried + self._momentum.take * used
        correction = 1 - keep ** (torch.tensor(made, dtype=torch.float64) + 1)
        return mixed / correction.unsqueeze(1)

    def _settle(self) -> None:
        """Read what waits on the device."""
        self._waiting = 0
        for entry in self.steps:
            copies = [each for each in entry.sums if isinstance(each, HostCopy)]
            if copies:
                entry.sums = np.sum([each.read() for each in copies], axis=0).tolist()
            if isinstance(entry.lr, HostCopy):
                entry.lr = entry.lr.number()
            if isinstance(entry.carried, HostCopy):
                *dots, steps = entry.carried.read().tolist()
                entry.carried = Carried(dots, steps)
            if entry.clip is not None:
                coef = entry.clip.read()
                if coef is not None:
                    entry.clip_coef = coef
                entry.clip = None
        read = (
            (step, losses.read().tolist() if isinstance(losses, HostCopy) else losses)
            for step, losses in self._losses
        )
        self._losses = deque(read, self._losses.maxlen)
