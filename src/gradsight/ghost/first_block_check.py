"""Whether a run's scores are right: the self-check, and the sum of the first block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from gradsight.core.samples import SplitCall
from gradsight.core.sharing import ModelGroup
from gradsight.errors import GradsightError
from gradsight.ghost.directions import Direction
from gradsight.ghost.gradients import dot
from gradsight.ghost.one_pass_check import OnePassCheck
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.sample_axis import Key, LayoutMemory
from gradsight.ghost.selfcheck import SelfCheck, rounding
from gradsight.ghost.tracer import RuleOptions, Tracer
from gradsight.ghost.tracing import paused


@dataclass(frozen=True, slots=True)
class ObservedPass:
    """The outcome of an observed pass that is to be judged."""

    scores: Tensor
    """[targets, B], loss scale divided out."""
    scale: Tensor | None
    calls: Sequence[SplitCall]
    uses: Mapping[Key, tuple[str, ...]]
    """The uses that the pass met, with their parameters."""


class FirstBlockCheck:
    """Decides when the twin has to be asked, and refuses blocks whose scores cannot be right."""

    def __init__(
        self, group: ModelGroup, memory: LayoutMemory, rules: RuleOptions, *, enabled: bool
    ) -> None:
        self._group = group
        self._memory = memory
        self._rules = rules
        self._enabled = enabled
        self._checked: set[bool] = set()
        self._one_pass_proven = False
        self._blocks = 0
        self._base: list[Tensor] | None = None

    @property
    def first(self) -> bool:
        """Whether the block at hand is the first that is checked."""
        return self._enabled and self._blocks == 0

    def start_block(self, parameters: ScoredParameters, directions: Sequence[Direction]) -> None:
        """Remember <D, .grad> before the first block; where D is unknown, .grad must be empty."""
        fresh = all(p.grad is None for p in parameters.trainable.values())
        self._base = None
        if self.first and (directions or fresh):
            self._base = self._explained(parameters, directions)

    def before_call(self, call: SplitCall, parameters: ScoredParameters, tracer: Tracer) -> None:
        """Ask the twin about the first batch, and about the first of more than one sample."""
        if not self._enabled:
            return
        # A batch of one proves no layout: everything in it belongs to the one sample.
        several = call.batch > 1
        if several not in self._checked:
            with paused(tracer):
                self._self_check(parameters).run([call])
            self._memory.prove()
            self._checked |= {several, False}
        one_pass = tracer.options.one_pass
        if one_pass is not None and not self._one_pass_proven and not self._group.sharded:
            with paused(tracer):
                OnePassCheck(parameters, tracer.options, one_pass).run(call)
            self._memory.prove()
            self._one_pass_proven = True

    def end_block(
        self,
        observed: ObservedPass,
        parameters: ScoredParameters,
        directions: Sequence[Direction],
    ) -> None:
        """The first block must add up to what backward added to .grad; new uses must be proven."""
        if self._base is not None:
            scores_in_grad = observed.scores
            if observed.scale is not None:
                scores_in_grad = scores_in_grad * observed.scale.to(scores_in_grad)
            after = self._explained(parameters, directions) or []
            pairs = zip_longest(self._base, after, fillvalue=0.0)
            changes = [float(new - old) for old, new in pairs]
            for change, scores in zip(changes, scores_in_grad, strict=True):
                refuse_unexplained(change, scores, parameters)
        self._blocks += 1
        if self._enabled and not observed.calls:
            raise GradsightError(
                "the model was not called through its forward, so the self-check had nothing to "
                "run. Call the model itself, or pass self_check=False if the scores were verified "
                "in another way."
            )
        if self._enabled and self._memory.unproven:
            self._prove_new_uses(observed, parameters)

    def _prove_new_uses(self, observed: ObservedPass, parameters: ScoredParameters) -> None:
        """Trust new uses where their shapes leave no choice, else ask the twin again."""
        unsure = self._memory.ambiguous()
        names = {name for key in unsure for name in observed.uses.get(key, ())}
        new = ", ".join(sorted(names)[:3])
        if unsure and self._group.sharded:
            raise GradsightError(
                f"{new} is used in a new way after the self-check: its scores are not proven"
            )
        if unsure:
            assumed = self._memory.snapshot()
            met = self._self_check(parameters).run(observed.calls[:1])
            self._memory.prove()
            if self._memory.snapshot() != assumed or unsure - met:
                raise GradsightError(
                    f"where the samples are at {new} cannot be told from this block's shapes: its "
                    "scores are discarded. Pass batch_dim to GhostEngine, or begin with a batch "
                    "whose size differs from its other dimensions."
                )
        self._memory.prove()

    def _self_check(self, parameters: ScoredParameters) -> SelfCheck:
        return SelfCheck(parameters, self._group, self._memory, self._rules)

    def _explained(
        self, parameters: ScoredParameters, directions: Sequence[Direction]
    ) -> list[Tensor] | None:
        """<D, .grad> by target as it stands; None where .grad is not simply what backward adds."""
        named = parameters.trainable
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in named.values())
        if self._group.size > 1 or hooked:
            return None
        zero = torch.zeros((), device=parameters.device)
        sums = []
        for direction in directions:
            dots = [
                dot(direction[name], p.grad).to(zero.device)
                for name, p in named.items()
                if name in direction and p.grad is not None
            ]
            sums.append(torch.stack(dots).sum() if dots else zero)
        return sums


def refuse_unexplained(change: float, scores: Tensor, parameters: ScoredParameters) -> None:
    """An error if scores do not add up to the change of <D, .grad>."""
    limit = 10 * rounding(parameters) * max(float(scores.abs().sum()), abs(change)) + 1e-30
    difference = abs(change - float(scores.sum()))
    if not difference <= limit:  # written so that a NaN is refused
        raise GradsightError(
            f"the scores add up to {float(scores.sum()):.6g}, but <direction, gradient> changed by "
            f"{change:.6g} in this block: a part of the gradient belongs to no sample (a "
            "regulariser in the loss, a parameter used where torch functions are not seen). Leave "
            "that part out of the observed loss; weight decay belongs in the optimizer."
        )
