"""Whether a run's scores are right: the self-check, and the sum of the first block."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from gradsight.core.samples import OtherShapes, SplitCall
from gradsight.core.sharing import ModelGroup
from gradsight.errors import GradsightError, in_one_line
from gradsight.ghost.directions import Direction
from gradsight.ghost.gradients import dot
from gradsight.ghost.one_pass import OnePass, OnePassRefusal
from gradsight.ghost.one_pass_check import OnePassCheck
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.row_moves import described_value
from gradsight.ghost.sample_axis import LayoutMemory
from gradsight.ghost.selfcheck import MOST_ROWS, ROWS_OF_NEW_SHAPES, NoLayout, SelfCheck, rounding
from gradsight.ghost.tracer import RuleOptions, Tracer
from gradsight.ghost.tracing import paused


@dataclass(frozen=True, slots=True)
class ObservedPass:
    """The outcome of an observed pass that is to be judged."""

    scores: Tensor
    """[targets, B], loss scale divided out."""
    scale: Tensor | None
    calls: Sequence[SplitCall]


MOST_SHAPES = 2_000
"""Shapes of batches that are remembered; above that, all are proven again as they come."""


class FirstBlockCheck:
    """Decides when to compare with the reference implementation, and rejects wrong scores.

    The first batch is compared, and every batch with new shapes: a layout that was proven for some
    shapes may be wrong for others.
    """

    def __init__(
        self, group: ModelGroup, memory: LayoutMemory, rules: RuleOptions, *, enabled: bool
    ) -> None:
        self._group = group
        self._memory = memory
        self._rules = rules
        self._enabled = enabled
        self._found: dict[int, str | None] = {}
        """By the shapes of a call, why its samples need passes of their own; None: they do not."""
        self._joined: set[tuple[int, tuple[int, ...]]] = set()
        """Shapes and numbers of rows for which one pass was proven."""
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

    def before_call(
        self, call: SplitCall, parameters: ScoredParameters, tracer: Tracer
    ) -> str | None:
        """Compare a call with new shapes with the reference implementation.

        Returns why every sample needs its own backward pass; None if fast scores are right.
        """
        reason = None
        if parameters.complex is not None:
            reason = f"{parameters.complex} is complex, and the fast rules know real numbers only"
        elif self._enabled:
            reason = self._proven(call, parameters, tracer)
        one_pass = tracer.options.one_pass
        if one_pass is None:
            return reason
        if reason is not None:
            raise OnePassRefusal(f"{reason}.")
        if self._enabled and not self._group.sharded:
            self._prove_one_pass(call, parameters, tracer, one_pass)
        return None

    def is_new(self, call: SplitCall, parameters: ScoredParameters, parts: Sequence[int]) -> bool:
        """Whether one pass has not been proven for a call of these shapes."""
        return self._enabled and (_shapes(call, parameters), tuple(parts)) not in self._joined

    def _proven(self, call: SplitCall, parameters: ScoredParameters, tracer: Tracer) -> str | None:
        shapes = _shapes(call, parameters)
        # A batch of one proves no layout: everything in it belongs to the one sample.
        is_new = shapes not in self._found and (call.batch > 1 or not self._found)
        if self._group.sharded:
            # Sharded models run in step: a process that has nothing to prove takes part.
            is_new = float(self._group.sum(torch.tensor(float(is_new)))) > 0
        if is_new:
            if len(self._found) > MOST_SHAPES:
                self._found.clear()
                self._joined.clear()
                self._memory.clear()
            rows = ROWS_OF_NEW_SHAPES if self._found else MOST_ROWS
            with paused(tracer):
                self._found[shapes] = self._fault(call, parameters, rows)
        return self._found.get(shapes)

    def _fault(self, call: SplitCall, parameters: ScoredParameters, rows: int) -> str | None:
        """Return why fast scores are wrong for a call; raise if samples influence each other."""
        try:
            SelfCheck(parameters, self._group, self._memory, self._rules).run([call], rows)
        except (NoLayout, OtherShapes) as refusal:
            reason = str(refusal)
        except (GradsightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = f"the fast rules fail on this model ({in_one_line(error)})"
        else:
            return None
        if parameters.sharded:
            raise GradsightError(
                f"this model cannot be scored under fully_shard, because {reason}. Outside of it, "
                "such a model is scored by one backward pass per sample: use "
                "DistributedDataParallel, or train without GhostEngine."
            )
        return reason

    def _prove_one_pass(
        self, call: SplitCall, parameters: ScoredParameters, tracer: Tracer, one_pass: OnePass
    ) -> None:
        known = _shapes(call, parameters), one_pass.parts.sizes
        if known not in self._joined:
            rows = ROWS_OF_NEW_SHAPES if self._joined else MOST_ROWS
            try:
                with paused(tracer):
                    OnePassCheck(parameters, tracer.options, one_pass).run(call, rows)
            except (GradsightError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise OnePassRefusal(
                    f"one pass fails on this model ({in_one_line(error)})."
                ) from error
            self._joined.add(known)

    def end_block(
        self,
        observed: ObservedPass,
        parameters: ScoredParameters,
        directions: Sequence[Direction],
    ) -> None:
        """The first block must add up to what backward added to .grad."""
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


def _shapes(call: SplitCall, parameters: ScoredParameters) -> int:
    """Return a hash of the shapes of a call, its other arguments, and what is trained."""
    described: list[object] = []
    for position, x in enumerate(call.flat):
        if isinstance(x, Tensor):
            described.append((tuple(x.shape), str(x.dtype), call.dims.get(position)))
        else:
            described.append(x if isinstance(x, bool | int | str) else type(x).__name__)
    trained = tuple(parameters.trainable)
    return hash((call.batch, str(call.spec), described_value(described), trained))


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
