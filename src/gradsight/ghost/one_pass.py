# mypy: allow-untyped-calls
"""What one pass over training and validation rows finds on its way back.

Rows meet nowhere but in parameters, so the losses of all rows are pulled back at once. At each use
of a parameter the validation rows' part of its gradient is a part of the direction. A parameter
that is used once is done on the spot: its direction is made, dotted with every training row's
gradient, and dropped. One that is used more than once, or behind other operations, has stand-ins:
leaves with its values, one per target, whose gradients autograd adds up to the direction. Whatever
such uses need for their scores waits until the stand-ins have theirs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsight.core.carried import current_task
from gradsight.core.guard import raise_as_gradsight_error
from gradsight.errors import GradsightError
from gradsight.ghost.arguments import INCOMPLETE
from gradsight.ghost.directions import Direction, Directions, Tangents
from gradsight.ghost.dots import vector_dots
from gradsight.ghost.refresh import AdamScales
from gradsight.ghost.row_parts import RowParts
from gradsight.ghost.tangent_sources import ParameterTangents, TangentSource

ADVICE = "Use mode='two_pass', which has no such limit."

Pairs = list[tuple[int, Tensor]]
"""Slots, and the scores that count there."""


class OnePassRefusal(GradsightError):
    """One pass cannot be right here; two passes may be."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text} {ADVICE}")
        self.reason = text


@dataclass(slots=True)
class Waiting:
    """Scores of one use that wait for the directions of its parameters."""

    missing: set[tuple[str, int]]
    """Parameters and targets whose direction has not arrived."""
    names: frozenset[str]
    score: Callable[[], Pairs]


class OnePass:
    """One pass over joined rows: who is used how often, and the scores found in its backward."""

    def __init__(
        self,
        parts: RowParts,
        targets: Sequence[str],
        parameters: Sequence[str] | None,
        scales: AdamScales | None = None,
    ) -> None:
        self.parts = parts
        self.targets = tuple(targets)
        self.uses: Counter[str] = Counter()
        """How often each parameter meets rows of samples."""
        self.losses: dict[str, Tensor] = {}
        """Each target's loss of its own rows."""
        self.loss_scale: Tensor | None = None
        """The factor that the targets' losses are pulled back with: a GradScaler's."""
        self.table: Tensor | None = None
        """Scores [slots, training rows] that came later than their use."""
        self.backwards = 0
        """Backward passes that came through the joined losses."""
        self.given_up = False
        self.tables: dict[str, Any] = {}
        """Embedding tables met in this pass, for a head that is tied to one."""
        self._found: dict[str, Direction] = {name: {} for name in targets}
        self.directions = Directions(self._found, self.targets, parameters=parameters)
        self.scales = scales
        self._stand_ins: dict[str, list[Tensor]] = {}
        self._waiting: list[Waiting] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def in_recompute(self) -> bool:
        """Whether activation checkpointing runs an operation again: no new use of a parameter."""
        return current_task() != -1

    def count(self, names: Iterable[str]) -> None:
        """Parameters meet rows of samples in one operation; a name for each place it stands at."""
        if self.in_recompute():
            self._refuse_unknown(names)
            return
        self.uses.update(names)

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        for name in names:
            if not self.uses[name]:
                raise OnePassRefusal(
                    f"{name} is first used in the backward pass, as re-entrant activation "
                    "checkpointing does: set use_reentrant=False."
                )

    def is_direct(self, source: TangentSource) -> bool:
        """Whether a source is a parameter itself."""
        return isinstance(source, ParameterTangents)

    def is_single(self, source: TangentSource) -> bool:
        """Whether a source is a parameter itself, and this its only use."""
        return self.is_direct(source) and self.uses[source.origins[0]] == 1

    def stand_ins(self, name: str, parameter: Tensor) -> list[Tensor]:
        """A parameter's values as leaves of their own, one per target."""
        known = self._stand_ins.get(name)
        if known is None:
            known = [parameter.detach().requires_grad_() for _ in self.targets]
            for number, leaf in enumerate(known):
                # No copy of the gradient is kept: it is taken away as soon as it is whole.
                take = partial(self._take_gradient, name, number)
                self._handles.append(leaf.register_post_accumulate_grad_hook(take))
            self._stand_ins[name] = known
        return known

    def leaves(self) -> list[tuple[str, int, Tensor]]:
        """All stand-ins, with their parameter and the number of their target."""
        found = []
        for name, leaves in self._stand_ins.items():
            found += [(name, number, leaf) for number, leaf in enumerate(leaves)]
        return found

    def tangents(self, source: TangentSource, parts: Sequence[Tensor]) -> Tangents:
        """The direction of a parameter that is used once, by slot, from each target's part."""
        name = source.origins[0]
        pairs = []
        for number, part in enumerate(parts):
            pairs.append((self.directions.slot(number, name), self._scaled(name, part)))
        return tuple(pairs)

    def from_sums(
        self, source: TangentSource | None, sums: Tensor, shape: torch.Size
    ) -> tuple[Tensor, list[Tensor] | None, Pairs]:
        """A small parameter's part of a use, from every row's own gradient [rows, n].

        Returns its gradient, each target's gradient for its stand-ins (None where the scores are
        made already), and those scores.
        """
        training = self.parts.of_training(sums)
        gradient = training.sum(0).view(shape)
        if source is None:
            return gradient, None, []
        numbers = range(len(self.targets))
        parts = [self.parts.of_target(sums, number).sum(0).view(shape) for number in numbers]
        if self.is_single(source):
            return gradient, None, vector_dots(training, self.tangents(source, parts))
        self.wait(source.origins, lambda: vector_dots(training, source.tangents()))
        return gradient, parts, []

    def wait(self, names: Sequence[str], score: Callable[[], Pairs]) -> None:
        """Score a use when the directions of its parameters are known."""
        if self.given_up:
            raise GradsightError(
                "this pass was given up, and its backward pass came after all: expected one "
                "loss.backward() for each engine.loss(), before the next one"
            )
        numbers = range(len(self.targets))
        missing = {(name, number) for name in names for number in numbers}
        missing -= self._arrived()
        self._waiting.append(Waiting(missing, frozenset(names), score))

    def finish(self) -> None:
        """The backward pass is over: what has not arrived will not."""
        for waiting in self._waiting:
            waiting.missing.clear()
        self._run_ready()

    def release(self) -> None:
        """Let go of every tensor."""
        self.given_up = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting.clear()
        self._stand_ins.clear()
        for direction in self._found.values():
            direction.clear()

    def _arrived(self) -> set[tuple[str, int]]:
        return {
            (name, number)
            for number, target in enumerate(self.targets)
            for name in self._found[target]
        }

    def _scaled(self, name: str, part: Tensor) -> Tensor:
        return part if self.scales is None else part * self.scales.get(name)

    def scaled_rows(self, name: str, rows: Tensor, which: Tensor) -> Tensor:
        """Some rows of a direction, scaled as the rows of the parameter that they belong to."""
        return rows if self.scales is None else rows * self.scales.get(name)[which]

    def _take_gradient(self, name: str, number: int, leaf: Tensor) -> None:
        part = leaf.grad
        leaf.grad = None
        try:
            self.take(name, number, part)
        except Exception as error:
            raise_as_gradsight_error(error, INCOMPLETE)

    def take(self, name: str, number: int, part: Tensor | None) -> None:
        """A stand-in has its whole gradient: a part of the direction is known."""
        if part is not None:  # torch tells of leaves that got none, too
            self._found[self.targets[number]][name] = self._scaled(name, part)
        for waiting in self._waiting:
            waiting.missing.discard((name, number))
        self._run_ready()

    def _run_ready(self) -> None:
        ready = [waiting for waiting in self._waiting if not waiting.missing]
        self._waiting = [waiting for waiting in self._waiting if waiting.missing]
        for waiting in ready:
            self._add(waiting.score())
        needed = {name for waiting in self._waiting for name in waiting.names}
        for name in {name for waiting in ready for name in waiting.names} - needed:
            self._forget(name)

    def _forget(self, name: str) -> None:
        for direction in self._found.values():
            direction.pop(name, None)
        self.directions.forget(name)

    def _add(self, pairs: Pairs) -> None:
        for slot, scores in pairs:
            mine = scores[: self.parts.train]
            if self.table is None:
                wide = torch.promote_types(mine.dtype, torch.float32)
                size = self.directions.slots, self.parts.train
                self.table = torch.zeros(size, dtype=wide, device=mine.device)
            self.table[slot] += mine.to(self.table)


def joined_gradients(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    probe: Tensor,
    one_pass: OnePass | None,
) -> tuple[Direction, Tensor]:
    """The gradient of sum <cotangent, output> by parameter, and the table of scores.

    No .grad is touched and no hook of a parameter runs, which may be an optimizer's step.
    """
    leaves = [] if one_pass is None else one_pass.leaves()
    inputs = [*parameters.values(), probe, *(leaf for _, _, leaf in leaves)]
    slopes = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    own = len(parameters)
    named = zip(parameters, slopes[:own], strict=True)
    gradient = {name: slope.detach() for name, slope in named if slope is not None}
    table = torch.zeros_like(probe) if slopes[own] is None else slopes[own].detach()
    if one_pass is None:
        return gradient, table
    with torch.no_grad():  # as in the hooks of a backward pass
        for (name, number, _), slope in zip(leaves, slopes[own + 1 :], strict=True):
            one_pass.take(name, number, slope)
        one_pass.finish()
    if one_pass.table is not None:
        table = table + one_pass.table.to(table)
    return gradient, table
