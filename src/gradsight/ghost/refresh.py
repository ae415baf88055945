"""When the targets' directions are computed anew, and in whose scale."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core.devices import is_accelerator
from gradsight.ghost.arguments import without_second_moments
from gradsight.ghost.directions import Direction
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.targets import Targets
from gradsight.measure.host_copy import HostCopy

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Staleness:
    """How far a direction had turned when it was refreshed."""

    step: int
    target: str
    cosine: float


class RefreshSchedule:
    """Refreshes the directions every so many steps, scaled by the optimizer where that is asked."""

    def __init__(
        self,
        targets: Targets,
        every: int,
        optimizer: Optimizer | None,
        precondition: str | None,
    ) -> None:
        self.kind = PLAIN
        """The kind of the present directions: "plain" or "adam"."""
        self._staleness: list[Staleness] = []
        self._turned: deque[tuple[int, str, HostCopy]] = deque()
        """The cosines that are on their way from the device, with their steps and targets."""
        self._targets = targets
        self._every = every
        self._optimizer = optimizer
        self._precondition = precondition
        self._refreshed_at: int | None = None

    def refresh_if_due(self, step: int, parameters: ScoredParameters) -> bool:
        """Compute the directions anew where they are due; returns whether they were."""
        last = self._refreshed_at
        kept = last is not None and bool(self._targets.directions)
        if last is not None and kept and last <= step < last + self._every:
            return False
        scales = self._scales(parameters)
        kind = PLAIN if scales is None else "adam"
        turned = self._targets.refresh(parameters, scales, compare=self._every > 1)
        if kind == self.kind:  # directions of two kinds have no angle worth telling
            for target, value in turned.items():
                self._turned.append((step, target, HostCopy.of(value.detach().reshape(1))))
        self._settle(wait=False)
        self.kind = kind
        self._refreshed_at = step
        return True

    @property
    def staleness(self) -> list[Staleness]:
        """How far each direction had turned at its refresh. Waits for the device."""
        self._settle(wait=True)
        return self._staleness

    def _settle(self, wait: bool) -> None:
        """Take in the cosines that have come, in their order."""
        while self._turned and (wait or self._turned[0][2].ready()):
            step, target, cosine = self._turned.popleft()
            self._staleness.append(Staleness(step, target, cosine.number()))

    def refresh_now(self, parameters: ScoredParameters) -> None:
        """Compute the directions anew, due or not, without counting it as a refresh."""
        self._targets.refresh(parameters, self._scales(parameters))

    def _scales(self, parameters: ScoredParameters) -> Direction | None:
        # Under Adam the plain score hardly correlates with what a sample does (R = 0.11 in the
        # paper), the scaled one almost perfectly (R > 0.99).
        if self._precondition == "adam" and self._optimizer is not None:
            return adam_scales(self._optimizer, parameters.trainable)
        return None

    def scales_of_pass(self, parameters: ScoredParameters) -> "AdamScales | None":
        """How one pass scales the directions that it finds; None: not at all."""
        scales = None
        if self._precondition == "adam" and self._optimizer is not None:
            scales = AdamScales(self._optimizer, parameters.trainable)
        if scales is not None and not scales.known:
            scales = None
        self.kind = PLAIN if scales is None else "adam"
        return scales


class AdamScales:
    """1 / (sqrt(v) + eps) of one parameter at a time: all of them are as large as the gradient."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._kind = type(optimizer).__name__
        self._parameters = parameters
        names = {id(p): name for name, p in parameters.items()}
        self._states: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if id(parameter) in names and state:
                    self._states[names[id(parameter)]] = (state, group)

    @property
    def known(self) -> bool:
        """Whether the optimizer has made a step."""
        return bool(self._states)

    def get(self, name: str) -> Tensor:
        """A parameter's scale; zeros for what the optimizer does not move."""
        if name not in self._states:
            return torch.zeros_like(self._parameters[name])
        second, start, eps = _moments(*self._states[name], self._kind)
        scale: Tensor = ((second / start).sqrt() + eps).reciprocal()
        return scale


def adam_scales(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Direction | None:
    """1 / (sqrt(v) + eps) of every parameter, v corrected for its start; None before a first step.

    Adam moves a weight by -lr m / (sqrt(v) + eps), so a sample's gradient acts on the target's loss
    through this scale.
    """
    scales = AdamScales(optimizer, parameters)
    if not scales.known:
        return None
    return {name: scales.get(name) for name in parameters}


def _moments(
    state: dict[str, Any], group: dict[str, Any], kind: str
) -> tuple[Tensor, float | Tensor, float]:
    """A parameter's second moment, what corrects it for its start, and eps."""
    second = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if second is None or "betas" not in group:
        raise without_second_moments(kind)
    beta2 = group["betas"][1]
    step = state["step"]
    if isinstance(step, Tensor):
        # One that counts on an accelerator stays there: reading it would wait for the device.
        there = is_accelerator(step.device)
        step = step.to(second.device, second.dtype) if there else float(step)
    return second, 1 - beta2**step, group["eps"]
