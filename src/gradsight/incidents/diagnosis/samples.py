# mypy: allow-untyped-calls
"""The guilty samples: the exact gradient norm of every sample, taken alone.

Sample i goes through the model alone, with the random numbers it had in the batch, and is pulled
back with its own rows of the gradient that the batch's loss sent to the model's outputs:
||J_i^T c_i||. Whole gradients are taken, so tied weights are right.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gradsight.core.beside import copied_arguments, replaying
from gradsight.core.calls import RecordedCall, module_of
from gradsight.core.devices import widest_float
from gradsight.core.layouts import is_plain
from gradsight.core.per_sample import BatchOutputs
from gradsight.core.samples import (
    NotSeparable,
    SplitCall,
    can_have_rows,
    collecting_loss_inputs,
    find_samples,
    tensors_in,
    tolerance,
)
from gradsight.errors import GradsightError
from gradsight.incidents.diagnosis.random_tape import RandomTape
from gradsight.incidents.diagnosis.rerun import (
    NoGradient,
    are_last,
    pull,
    run_model,
    trained_parameters,
)
from gradsight.incidents.diagnosis.watcher import Budget

_MISSING = 0.05
"""The part of the gradient that may be missing in the sum over samples before that is said."""


@dataclass(slots=True)
class SampleNorms:
    """The norms of samples by row, as far as time allowed, and remarks on them."""

    batch: int = 0
    by_row: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether no sample is missing."""
        return len(self.by_row) == self.batch > 0


@dataclass(frozen=True, slots=True)
class PassOutputs:
    """What came of a pass: the model's outputs, and the tensors that loss functions were given."""

    own: list[Tensor]
    loss_inputs: list[Tensor]


@dataclass(frozen=True, slots=True)
class RowedOutputs:
    """Which of a pass's outputs samples have rows in; the same ones in the pass of one sample."""

    in_losses: bool
    positions: tuple[int, ...]

    def of(self, outputs: PassOutputs) -> list[Tensor]:
        """Those tensors of a pass."""
        tensors = outputs.loss_inputs if self.in_losses else outputs.own
        if self.positions and self.positions[-1] >= len(tensors):
            raise NotSeparable(
                f"the model gives another number of outputs for one sample alone ({len(tensors)})"
            )
        return [tensors[position] for position in self.positions]


@dataclass(frozen=True, slots=True)
class BatchPass:
    """The pass of the whole batch: what each sample's is compared with and cut out of."""

    call: RecordedCall
    arguments: SplitCall
    tape: RandomTape
    rowed: RowedOutputs
    outputs: BatchOutputs
    gradient: list[Tensor | None]
    """The gradient of the parameters, from the model's last outputs."""


class _OwnRandomness(Exception):
    """A sample alone drew other random numbers than in its batch."""


def have_same_rows(root: nn.Module, calls: Sequence[RecordedCall]) -> bool:
    """Whether all calls were given the same number of samples."""
    try:
        sizes = {
            find_samples(call.args, call.kwargs, None, None, module_of(root, call)).batch
            for call in calls
        }
    except NotSeparable:
        return False
    return len(sizes) == 1


def measure_samples(
    root: nn.Module, calls: Sequence[RecordedCall], budget: Budget, norms: SampleNorms
) -> None:
    """Fill in the norms of the samples, the likeliest culprits first.

    Of several calls that continue one another the gradients are summed: a sample has the same row
    in all of them.
    """
    _refuse_mixing(root, calls[0])
    try:
        _measure(root, calls, budget, norms)
    except _OwnRandomness:
        norms.by_row.clear()
        norms.notes.append(
            "norms were taken with dropout off: the batch's random numbers could not be dealt out "
            "to its samples"
        )
        calls = [replace(call, training=False) for call in calls]
        _measure(root, calls, budget, norms)


def _measure(
    root: nn.Module, calls: Sequence[RecordedCall], budget: Budget, norms: SampleNorms
) -> None:
    batches = [_run_batch(root, call, budget) for call in calls]
    norms.batch = batches[0].outputs.size
    rest = _summed([batch.gradient for batch in batches])
    for row in _likeliest_first([batch.outputs for batch in batches]):
        budget.check()
        gradient = _summed([_run_alone(root, batch, row) for batch in batches])
        norms.by_row[row] = _norm(gradient)
        rest = [_difference(a, b) for a, b in zip(rest, gradient, strict=True)]
    if _norm(rest) > _MISSING * max(norms.by_row.values(), default=0.0):
        norms.notes.append(
            "the samples' gradients do not add up to the gradient: part of it does not come "
            "through rows of the outputs"
        )


def _refuse_mixing(root: nn.Module, call: RecordedCall) -> None:
    for tensor in tensors_in(*call.args, *call.kwargs.values()):
        if not is_plain(tensor):
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise NotSeparable(
                f"the model was called with a tensor of layout {kind}, from which Gradsight "
                "cannot take one sample"
            )
    if not call.training:
        return
    for module in root.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.training or module.running_mean is None:
            raise NotSeparable(
                f"{type(module).__name__} takes statistics over the batch, so no sample has a "
                "gradient of its own in this model"
            )


def _run_batch(root: nn.Module, call: RecordedCall, budget: Budget) -> BatchPass:
    budget.check()
    tape = RandomTape(budget)
    size = None if call.sample_ids is None else len(call.sample_ids)
    arguments = find_samples(call.args, call.kwargs, size, None, module_of(root, call))
    with replaying(root, call), tape.writes_undone(), tape:
        outputs = _forward(root, call)
        rowed = _rowed(outputs)
        totals = _totals(call, outputs.own)
        rows = rowed.of(outputs)
        at_rows = _direct(rows, _at_rows(rows, outputs.own, totals))
        known = {number: total for number, total in enumerate(totals) if total is not None}
        at_last = _direct(outputs.own, known)
        # Under the tape too: what activation checkpointing computes again draws again.
        gradient = pull(
            [outputs.own[number] for number in at_last],
            list(at_last.values()),
            trained_parameters(root),
        )
    return BatchPass(
        call,
        arguments,
        tape,
        RowedOutputs(rowed.in_losses, tuple(rowed.positions[number] for number in at_rows)),
        BatchOutputs(
            [rows[number].detach() for number in at_rows],
            list(at_rows.values()),
            arguments.batch,
            _rounding(call, gradient),
        ),
        gradient,
    )


def _run_alone(root: nn.Module, batch: BatchPass, row: int) -> list[Tensor | None]:
    """The gradient of one sample's own share."""
    args, kwargs = batch.arguments.row(row)
    alone = replace(batch.call, args=args, kwargs=kwargs)
    batch.tape.row = (row, batch.outputs.size)
    with replaying(root, batch.call), batch.tape.writes_undone(), batch.tape:
        try:
            outputs = _forward(root, alone)
        except GradsightError:
            raise
        except Exception as error:  # nodes of a graph are no samples, for example
            message = f"{type(error).__name__}: {str(error)[:200]}"
            raise NotSeparable(f"one sample alone raised {message}") from error
        if batch.tape.unknown:
            raise _OwnRandomness
        rows = batch.rowed.of(outputs)
        try:
            # Not by the loss of the row alone: with ignored labels that is another mean.
            pieces = batch.outputs.cotangents_of(row, rows)
        except NotSeparable:
            if batch.tape.has_drawn:  # then the difference may be due to that
                raise _OwnRandomness from None
            raise
        return pull(rows, pieces, trained_parameters(root))


def _forward(root: nn.Module, call: RecordedCall) -> PassOutputs:
    loss_inputs: list[Tensor] = []
    with collecting_loss_inputs(loss_inputs):
        own = run_model(module_of(root, call), *copied_arguments(call))
    return PassOutputs(own, loss_inputs)


def _rowed(outputs: PassOutputs) -> RowedOutputs:
    """The outputs with rows: the model's, or else what its loss functions were given."""
    own = [position for position, y in enumerate(outputs.own) if can_have_rows(y)]
    # A loss may have a dimension of its own: what is a single number comes last.
    several = [position for position in own if outputs.own[position].numel() > 1]
    given = [position for position, y in enumerate(outputs.loss_inputs) if can_have_rows(y)]
    if several or not given:
        return RowedOutputs(in_losses=False, positions=tuple(several or own))
    return RowedOutputs(in_losses=True, positions=tuple(given))


def _totals(call: RecordedCall, outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient at every output, as it was kept."""
    kept = call.output_gradients
    if kept is None or len(kept) != len(outputs) or all(c is None for c in kept):
        raise NoGradient("the gradients at the model's outputs were not kept")
    return [c if y.requires_grad else None for y, c in zip(outputs, kept, strict=True)]


def _at_rows(
    rows: Sequence[Tensor], outputs: Sequence[Tensor], totals: Sequence[Tensor | None]
) -> dict[int, Tensor]:
    """The gradient at every tensor with rows: as kept, or pulled to it from a returned loss."""
    kept = {id(y): c for y, c in zip(outputs, totals, strict=True) if c is not None}
    at_rows = {number: kept[id(y)] for number, y in enumerate(rows) if id(y) in kept}
    losses = [y for y in outputs if y.numel() == 1 and id(y) in kept]
    if not at_rows and losses and rows:
        pulled = pull(losses, [kept[id(y)] for y in losses], rows, keep=True)
        at_rows = {number: c for number, c in enumerate(pulled) if c is not None}
    if not at_rows:
        raise NotSeparable(
            "the model returns nothing in which samples have rows, and its loss function is not a "
            "known one"
        )
    return at_rows


def _direct(rows: Sequence[Tensor], totals: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Of each gradient the part that did not come through another of these tensors.

    A tensor to which nothing came directly is left out.
    """
    direct: dict[int, Tensor] = {}
    # By identity: a model may return one tensor twice.
    waiting = list({id(rows[number]): number for number in totals}.values())
    while waiting:
        ends = are_last([rows[number] for number in waiting])
        last = [number for number, end in zip(waiting, ends, strict=True) if end]
        for number in last:
            via = _pulled_through(rows, direct, number)
            if via is None:
                direct[number] = totals[number]
                continue
            own = totals[number] - via
            noise = tolerance(own.dtype) / 10 * float(via.abs().max())
            if float(own.abs().max()) > noise:
                direct[number] = own
        waiting = [number for number in waiting if number not in last]
    return direct


def _pulled_through(
    rows: Sequence[Tensor], direct: Mapping[int, Tensor], number: int
) -> Tensor | None:
    """What the gradients at later tensors send to this one."""
    if not direct:
        return None
    later = [rows[each] for each in direct]
    (via,) = pull(later, list(direct.values()), [rows[number]], keep=True)
    return via


def _rounding(call: RecordedCall, gradient: Sequence[Tensor | None]) -> float | None:
    """The difference that 16 bits may make between a sample alone and in its batch."""
    narrow = any(each is not None and each.element_size() < 4 for each in gradient)
    if narrow or call.autocast is not None:
        return tolerance(torch.bfloat16)
    return None


def _likeliest_first(batches: Sequence[BatchOutputs]) -> list[int]:
    """The rows, those to which the largest gradient came first."""
    # Time may run out: the culprit should be among those that have been measured by then.
    size = batches[0].size
    weights = torch.zeros(size, dtype=torch.float64, device="cpu")
    for cotangent in [each for batch in batches for each in batch.cotangents]:
        if cotangent.dim() and cotangent.shape[0] % size == 0:
            rows = cotangent.detach().unflatten(0, (size, -1)).flatten(1)
            wide = torch.promote_types(rows.dtype, torch.float32)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=wide)
            weights += norms.cpu().double().square()
    return torch.nan_to_num(weights, nan=math.inf).argsort(descending=True, stable=True).tolist()


def _norm(gradient: Sequence[Tensor | None]) -> float:
    """The norm over all parameters, in float64."""
    squares = 0.0
    for each in gradient:
        if each is not None:
            values = each.coalesce().values() if each.is_sparse else each
            # In float32 the squares of finite entries of 1e30 are infinite.
            squares += float(torch.linalg.vector_norm(values.to(widest_float(values.device)))) ** 2
    return math.sqrt(squares)


def _summed(gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """The sum over calls of the gradient of each parameter."""
    total = list(gradients[0])
    for gradient in gradients[1:]:
        pairs = zip(total, gradient, strict=True)
        total = [b if a is None else a if b is None else a + b for a, b in pairs]
    return total


def _difference(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if b is None:
        return a
    return -b if a is None else a - b
