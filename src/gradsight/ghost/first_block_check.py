"""Proof that the scores of a run are right: the self-check, and what every first block must add up
to.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from gradsight.core.samples import tolerance
from gradsight.core.sharing import Ranks
from gradsight.errors import GradsightError
from gradsight.ghost.gradients import dot
from gradsight.ghost.observation import Observation
from gradsight.ghost.parameters import Parameters
from gradsight.ghost.passes import ModelCall
from gradsight.ghost.sample_axis import LayoutMemory
from gradsight.ghost.selfcheck import SelfCheck
from gradsight.ghost.targets import Direction
from gradsight.ghost.tracer import Options, Tracer, paused


class Proof:
    """Decides when the twin has to be asked, and refuses blocks whose scores cannot be right."""

    def __init__(
        self, root: nn.Module, ranks: Ranks, memory: LayoutMemory, enabled: bool, options: Options
    ) -> None:
        self._root, self._ranks, self._memory = root, ranks, memory
        self._enabled, self._options = enabled, options
        self._checked: set[bool] = set()
        self._blocks = 0
        self._base: list[Tensor] | None = None

    @property
    def first(self) -> bool:
        """Whether the block at hand is the first that is proven."""
        return self._enabled and self._blocks == 0

    def start_block(self, parameters: Parameters, directions: Sequence[Direction]) -> None:
        """Remember <D, .grad> before the first block; where D is not known yet, .grad must be
        empty.
        """
        fresh = all(p.grad is None for p in parameters.trainable.values())
        self._base = (
            self._explained(parameters, directions)
            if self.first and (directions or fresh)
            else None
        )

    def before_call(self, call: ModelCall, parameters: Parameters, tracer: Tracer) -> None:
        """Ask the twin about the first batch, and about the first of more than one sample, before
        the pass itself.
        """
        kind = call.batch > 1
        if not self._enabled or kind in self._checked:
            return
        with paused(tracer):
            SelfCheck(self._root, parameters, self._ranks, self._memory, self._options).run([call])
        self._memory.prove()
        self._checked |= {kind, False}

    def end_block(
        self,
        observation: Observation,
        table: Tensor,
        parameters: Parameters,
        directions: Sequence[Direction],
    ) -> None:
        """The first block's scores must add up to what backward added to .grad; uses that are new
        must be proven.
        """
        if self._base is not None:
            after = self._explained(parameters, directions) or []
            scale = observation.scales[-1].to(table) if observation.scales else 1.0
            changes = [
                float(new - old) for old, new in zip_longest(self._base, after, fillvalue=0.0)
            ]
            for change, scores in zip(changes, table * scale, strict=True):
                refuse_unexplained(change, scores, parameters)
        self._blocks += 1
        if self._enabled and not observation.calls:
            raise GradsightError(
                "the model was not called through its forward, so the self-check had nothing to run. Call the model itself, or "
                "pass self_check=False if the scores were verified in another way."
            )
        if self._enabled and self._memory.unproven:
            self._prove_new_uses(observation, parameters)

    def _prove_new_uses(self, observation: Observation, parameters: Parameters) -> None:
        """Uses that the self-check did not meet: trusted where the shapes leave no choice, else the
        twin is asked again.
        """
        unsure = self._memory.ambiguous()
        new = ", ".join(
            sorted({name for key in unsure for name in observation.tracer.keys.get(key, ())})[:3]
        )
        if unsure and self._ranks.sharded:
            raise GradsightError(
                f"{new} is used in a new way after the self-check: its scores are not proven"
            )
        if unsure:
            assumed = self._memory.snapshot()
            met = SelfCheck(self._root, parameters, self._ranks, self._memory, self._options).run(
                observation.calls[:1]
            )
            self._memory.prove()
            if self._memory.snapshot() != assumed or unsure - met:
                raise GradsightError(
                    f"where the samples are at {new} cannot be told from this block's shapes: its scores are discarded. Pass "
                    "batch_dim to GhostEngine, or begin with a batch whose size differs from its other dimensions."
                )
        self._memory.prove()

    def _explained(
        self, parameters: Parameters, directions: Sequence[Direction]
    ) -> list[Tensor] | None:
        """<D, .grad> by target as it stands; None where .grad is not simply what backward adds up."""
        named = parameters.trainable
        if self._ranks.size > 1 or any(
            p._backward_hooks or p._post_accumulate_grad_hooks for p in named.values()
        ):
            return None
        zero = torch.zeros((), device=parameters.device)
        found = [
            [dot(d[n], p.grad) for n, p in named.items() if n in d and p.grad is not None]
            for d in directions
        ]
        return [
            torch.stack([v.to(zero.device) for v in values]).sum() if values else zero
            for values in found
        ]


def refuse_unexplained(change: float, scores: Tensor, parameters: Parameters) -> None:
    """An error if scores do not add up to the change of <D, .grad>: then some of the gradient
    belongs to no sample.
    """
    limit = 10 * rounding(parameters)
    if (
        not abs(change - float(scores.sum()))
        <= limit * max(float(scores.abs().sum()), abs(change)) + 1e-30
    ):
        raise GradsightError(
            f"the scores add up to {float(scores.sum()):.6g}, but <direction, gradient> changed by {change:.6g} in this "
            "block: a part of "
            "the gradient belongs to no sample (a regulariser in the loss, a parameter used where torch functions are "
            "not seen). "
            "Leave that part out of the observed loss; weight decay belongs in the optimizer."
        )


def rounding(parameters: Parameters) -> float:
    """The relative difference that rounding may cause in this model, automatic mixed precision
    included.
    """
    if torch.is_autocast_enabled(parameters.device.type):
        return tolerance(torch.bfloat16)
    return max(tolerance(p.dtype) for p in parameters.trainable.values())
