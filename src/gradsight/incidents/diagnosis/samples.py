# mypy: allow-untyped-calls
"""The guilty samples: the exact gradient norm of every sample, taken alone.

Sample i goes through the model alone, with the random numbers it had in the batch, and is pulled
back with its own rows of the gradient that the batch's loss sent to the model's outputs: ||J_i^T
c_i||. Whole gradients are taken, so tied weights are right.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.beside import arguments, replaying
from gradsight.core.calls import RecordedCall
from gradsight.core.samples import (
    ModelCall,
    NotSeparable,
    collecting,
    part_of,
    rowed,
    tell_batch,
    tolerance,
)
from gradsight.incidents.diagnosis.budget import Budget
from gradsight.incidents.diagnosis.randomness import Tape
from gradsight.incidents.diagnosis.rerun import NoGradient, call, ends, parameters_of, pull

_MISSING = 0.05
"""The part of the gradient that may be missing in the sum over samples before that is said."""


@dataclass(slots=True)
class Norms:
    """The norms of a micro-batch's samples by row, as far as time allowed, and what is to be said
    about them.
    """

    batch: int = 0
    by_row: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Whole:
    """The pass of the whole batch: what each sample's is compared with and cut out of."""

    one: RecordedCall
    call: ModelCall
    tape: Tape
    outputs: Mapping[int, Tensor]
    """The outputs that samples have rows in, by their position among those."""
    cotangents: Mapping[int, Tensor]
    gradient: list[Tensor | None]
    """The gradient of the parameters, from the model's last outputs."""


def measure(root: nn.Module, one: RecordedCall, budget: Budget, found: Norms) -> None:
    """Fill in the norms of a pass's samples, the likeliest culprits first."""
    _refuse_mixing(root, one)
    try:
        _measure(root, one, budget, found)
    except _OwnRandomness:
        found.by_row.clear()
        found.notes.append(
            "norms were taken with dropout off: the batch's random numbers could not be dealt out to its samples"
        )
        _measure(root, replace(one, training=False), budget, found)


class _OwnRandomness(Exception):
    """A sample alone drew other random numbers than in its batch."""


def _measure(root: nn.Module, one: RecordedCall, budget: Budget, found: Norms) -> None:
    whole = _whole(root, one, budget)
    found.batch = whole.call.batch
    total: list[Tensor | None] = [None] * len(whole.gradient)
    for row in _order(whole):
        budget.check()
        gradient = _alone(root, whole, row)
        found.by_row[row] = _norm(gradient)
        total = [_sum(a, b) for a, b in zip(total, gradient, strict=True)]
    missing = _norm(
        [_sum(a, None if b is None else -b) for a, b in zip(total, whole.gradient, strict=True)]
    )
    if missing > _MISSING * max(found.by_row.values(), default=0.0):
        found.notes.append(
            "the samples' gradients do not add up to the gradient: part of it does not come through rows of the outputs"
        )


def _refuse_mixing(root: nn.Module, one: RecordedCall) -> None:
    for module in root.modules():
        mixing = isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or module.running_mean is None
        )
        if mixing and one.training:
            raise NotSeparable(
                f"{type(module).__name__} takes statistics over the batch, so no sample has a gradient of its own in this model"
            )


def _forward(
    root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The model's outputs, and those tensors that samples have rows in."""
    losses: list[Tensor] = []
    with collecting(losses):
        outputs = call(root, args, kwargs)
    several = [y for y in outputs if y.numel() > 1]  # a loss may have a dimension of its own
    return outputs, rowed(several, losses) or rowed(outputs, losses)


def _whole(root: nn.Module, one: RecordedCall, budget: Budget) -> Whole:
    budget.check()
    tape = Tape(budget)
    told = tell_batch(
        one.args,
        one.kwargs,
        len(one.sample_ids) if one.sample_ids is not None else None,
        None,
        root,
    )
    with replaying(root, one, tape), tape:
        outputs, rows = _forward(root, *arguments(one))
        totals = _totals(one, outputs)
        chosen = _direct(rows, _at_rows(rows, outputs, totals))
        last = _direct(outputs, {number: c for number, c in enumerate(totals) if c is not None})
        gradient = pull([outputs[n] for n in last], list(last.values()), parameters_of(root))
    values = {number: rows[number].detach() for number in chosen}
    return Whole(one, told, tape, values, chosen, gradient)


def _totals(one: RecordedCall, outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient at every output, as it was kept."""
    kept = one.output_gradients
    if kept is None or len(kept) != len(outputs) or all(c is None for c in kept):
        raise NoGradient("the gradients at the model's outputs were not kept")
    return [c if y.requires_grad else None for y, c in zip(outputs, kept, strict=True)]


def _at_rows(
    rows: Sequence[Tensor], outputs: Sequence[Tensor], totals: Sequence[Tensor | None]
) -> dict[int, Tensor]:
    """The gradient at every tensor with rows: as kept, or pulled to it from a loss that the model
    returned.
    """
    kept = {id(y): c for y, c in zip(outputs, totals, strict=True) if c is not None}
    found = {number: kept[id(y)] for number, y in enumerate(rows) if id(y) in kept}
    losses = [(y, kept[id(y)]) for y in outputs if y.numel() == 1 and id(y) in kept]
    if not found and losses and rows:
        pulled = pull([y for y, _ in losses], [c for _, c in losses], rows, keep=True)
        found = {number: c for number, c in enumerate(pulled) if c is not None}
    if not found:
        raise NotSeparable(
            "the model returns nothing in which samples have rows, and its loss function is not a known one"
        )
    return found


def _direct(rows: Sequence[Tensor], totals: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Of each gradient the part that did not come through another of these tensors; what is left of
    none is dropped.
    """
    chosen: dict[int, Tensor] = {}
    waiting = list(
        {id(rows[number]): number for number in totals}.values()
    )  # a tensor may be listed twice
    while waiting:
        last = [n for n, end in zip(waiting, ends([rows[n] for n in waiting]), strict=True) if end]
        for number in last:
            own, via = totals[number], None
            if chosen:
                (via,) = pull(
                    [rows[n] for n in chosen], list(chosen.values()), [rows[number]], keep=True
                )
                own = own if via is None else own - via
            if via is None or float(own.abs().max()) > tolerance(own.dtype) / 10 * float(
                via.abs().max()
            ):
                chosen[number] = own
        waiting = [n for n in waiting if n not in last]
    return chosen


def _alone(root: nn.Module, whole: Whole, row: int) -> list[Tensor | None]:
    """The gradient of one sample's own share."""
    batch = whole.call.batch
    whole.tape.row = (row, batch)
    args, kwargs = whole.call.row(row)
    copies = replace(whole.one, args=args, kwargs=kwargs)
    with replaying(root, whole.one, whole.tape), whole.tape:
        _, rows = _forward(root, *arguments(copies))
        if whole.tape.unknown:
            raise _OwnRandomness
        numbers = list(whole.outputs)
        if numbers[-1] >= len(rows):
            raise NotSeparable(
                f"the model gives another number of outputs for one sample alone ({len(rows)})"
            )
        pieces = [
            whole.cotangents[n][_part(whole, whole.outputs[n], rows[n], row)] for n in numbers
        ]
        return pull([rows[n] for n in numbers], pieces, parameters_of(root))


def _part(whole: Whole, output: Tensor, alone: Tensor, row: int) -> tuple[slice, ...]:
    """Where a sample is in an output; where random numbers were drawn, a difference may be due to
    those.
    """
    coarse = whole.one.autocast is not None or any(
        g is not None and g.element_size() < 4 for g in whole.gradient
    )
    try:
        return part_of(
            output, alone, row, whole.call.batch, tolerance(torch.bfloat16) if coarse else None
        )
    except NotSeparable:
        if whole.tape.has_drawn:
            raise _OwnRandomness from None
        raise


def _order(whole: Whole) -> list[int]:
    """The rows, those to which the largest gradient came first."""
    batch = whole.call.batch
    weights = torch.zeros(batch, dtype=torch.float64)
    for cotangent in whole.cotangents.values():
        if cotangent.dim() and cotangent.shape[0] % batch == 0:
            rows = cotangent.detach().unflatten(0, (batch, -1)).flatten(1)
            weights += torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square().cpu()
    return torch.nan_to_num(weights, nan=math.inf).argsort(descending=True, stable=True).tolist()


def _norm(gradient: Sequence[Tensor | None]) -> float:
    """The norm over all parameters, in float64."""
    return math.sqrt(
        sum(float(_values(g).double().square().sum()) for g in gradient if g is not None)
    )


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a + b
