# mypy: allow-untyped-calls
"""The universal way in one pass: any operation whose outputs hold samples in rows.

It is run once with the parameters and once per target with their stand-ins; the training rows are
taken from the first run, each target's from its own. So autograd itself hands the training rows'
gradient to the parameters and each target's to its stand-ins. The scores are taken as in two
passes, by the operation's directional derivative, once the directions are known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsight.ghost.derivative import OperatorCall
from gradsight.ghost.fallback import (
    Score,
    SharedDerivatives,
    derivative_score,
    once_differentiable,
)
from gradsight.ghost.one_pass import OnePass
from gradsight.ghost.row_parts import RowParts, joined_pieces, only_rows, pieces_of
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.tangent_sources import TangentSource, origins_of


@dataclass(frozen=True, slots=True)
class JoinedCall:
    """An operation in which parameters meet joined rows."""

    call: OperatorCall
    flat: Sequence[Any]
    """Its inputs."""
    carried: Mapping[int, TangentSource]
    """Those that carry directions, by position."""
    stand_ins: Mapping[int, list[Tensor]]
    """Of the same positions, one per target."""

    @property
    def tensors(self) -> list[Tensor]:
        """Its inputs that are tensors, in the order in which derivatives want them back."""
        return [x for x in self.flat if isinstance(x, Tensor)]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that take part."""
        return origins_of(self.carried.values())

    def with_stand_ins(self, number: int) -> list[Any]:
        """The outputs with a target's stand-ins in the parameters' places."""
        flat = list(self.flat)
        for position, leaves in self.stand_ins.items():
            flat[position] = leaves[number]
        return self.call.run(flat)

    def with_inputs(self, inputs: Mapping[int, Any]) -> "JoinedCall":
        """The same call with other inputs at some positions."""
        flat = list(self.flat)
        for position, value in inputs.items():
            flat[position] = value
        return JoinedCall(self.call, flat, self.carried, self.stand_ins)


def run_joined(
    one_pass: OnePass,
    operation: JoinedCall,
    outputs: Sequence[Any],
    layouts: Mapping[int, SampleLayout],
) -> list[Any]:
    """The outputs of a call, those with a layout joined of one run per kind of rows."""
    versions = [operation.with_stand_ins(number) for number in range(len(one_pass.targets))]
    scores = scores_of(operation, layouts, one_pass.parts.total)
    made = list(outputs)
    for j, layout in layouts.items():
        use = WaitingUse(one_pass, operation.names, scores[j], layout, sliced=False)
        pieces = [outputs[j], *(version[j] for version in versions)]
        made[j] = JoinRows.apply(use, len(pieces), *pieces, *operation.tensors)
    return made


def run_sliced(
    one_pass: OnePass,
    operation: JoinedCall,
    layouts: Mapping[int, SampleLayout],
    for_targets: Mapping[int, Any] | None = None,
) -> Tensor:
    """The only output of a call, some inputs cut into the rows of training and of each target.

    layouts: of those inputs, by position; the first is the output's too. for_targets: other inputs
    for the targets' rows.
    """
    cuts = {i: pieces_of(operation.flat[i], each, one_pass.parts) for i, each in layouts.items()}
    training = operation.with_inputs({i: pieces[0] for i, pieces in cuts.items()})
    rows = [training.call.run_first(training.flat)]
    for number in range(len(one_pass.targets)):
        inputs = {i: pieces[number + 1] for i, pieces in cuts.items()}
        own = operation.with_inputs({**inputs, **(for_targets or {})})
        rows.append(own.with_stand_ins(number)[0])
    layout = next(iter(layouts.values()))
    score = scores_of(training, {0: layout}, one_pass.parts.train)[0]
    use = WaitingUse(one_pass, operation.names, score, layout, sliced=True)
    made: Tensor = JoinRows.apply(use, len(rows), *rows, *training.tensors)
    return made


def sliced_apart(
    parts: RowParts,
    operation: JoinedCall,
    layouts: Mapping[int, SampleLayout],
    for_targets: Mapping[int, Any],
) -> Tensor:
    """The same for a call without parameters: nothing in it is scored."""
    cuts = {i: pieces_of(operation.flat[i], each, parts) for i, each in layouts.items()}
    rows = []
    for number in range(len(parts.sizes)):
        inputs = {i: pieces[number] for i, pieces in cuts.items()}
        if number:
            inputs.update(for_targets)
        own = operation.with_inputs(inputs)
        rows.append(own.call.run_first(own.flat))
    return torch.cat(rows, next(iter(layouts.values())).dim)


def scores_of(
    operation: JoinedCall, layouts: Mapping[int, SampleLayout], batch: int
) -> dict[int, Score]:
    """How each output with a layout is scored, once the directions are known."""
    shared = SharedDerivatives(operation.call, operation.flat, operation.carried, len(layouts))
    return {j: derivative_score(shared, j, layout, batch) for j, layout in layouts.items()}


@dataclass(frozen=True, slots=True)
class WaitingUse:
    """How one output is joined of several versions, and scored later."""

    one_pass: OnePass
    names: tuple[str, ...]
    score: Score
    layout: SampleLayout
    sliced: bool
    """Whether each version has its own rows alone."""


class JoinRows(torch.autograd.Function):
    """Joins the versions of an output, and keeps the training rows' gradient for scores to come.

    One function for both: the use waits for its directions before any of its gradients flows on to
    the stand-ins, so none can be complete, and forgotten, without it.
    """

    @staticmethod
    def forward(ctx: Any, use: WaitingUse, number: int, *tensors: Tensor) -> Tensor:
        """The rows of training from the first version, each target's from its own."""
        ctx.use = use
        ctx.number = number
        ctx.save_for_backward(*tensors[number:])
        versions = tensors[:number]
        if use.sliced:
            return torch.cat(versions, use.layout.dim)
        return joined_pieces(versions, use.layout, use.one_pass.parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Each version's own rows of the gradient."""
        use = ctx.use
        parts = use.one_pass.parts
        if use.sliced:
            slopes = pieces_of(grad, use.layout, parts)
        else:
            slopes = [only_rows(grad, use.layout, parts, number) for number in range(ctx.number)]
        saved = ctx.saved_tensors
        use.one_pass.wait(use.names, partial(use.score, slopes[0], saved))
        return None, None, *slopes, *(None,) * len(saved)
