"""The guilty operation of a call: run again, forward and backward, under a Finder."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from gradsight.core.beside import copied_arguments, replaying
from gradsight.core.calls import CallNumber, RecordedCall, module_of
from gradsight.core.layouts import entries, is_plain
from gradsight.core.parameters import clean_name, named_parameters
from gradsight.core.samples import NotSeparable, find_samples, tensors_in
from gradsight.incidents.diagnosis.finder import Event, Finder
from gradsight.incidents.diagnosis.loss import fault_in_loss
from gradsight.incidents.diagnosis.numbers import nonfinite_in, summary
from gradsight.incidents.diagnosis.places import module_names, source_of
from gradsight.incidents.diagnosis.rerun import (
    NoGradient,
    are_last,
    pull,
    run_model,
    trained_parameters,
)
from gradsight.incidents.diagnosis.watcher import Budget
from gradsight.values.diagnoses import GuiltyOperation

_NAMED = 3
Pair = tuple[Tensor, Tensor]
"""An output and the gradient that came back to it."""
OutputKind = tuple[str, tuple[int, ...]]
"""The autograd node of an output by its name, and the shape of the output."""


def find_operation(
    root: nn.Module,
    call: RecordedCall,
    budget: Budget,
    *,
    others: Sequence[RecordedCall] = (),
    loss_root: Tensor | None = None,
) -> GuiltyOperation | None:
    """The operation that made this call's gradient non-finite; None where the call is innocent.

    others: the other calls of its micro-batch, which the same backward pass went through.
    """
    finder = _finder(root, call, budget)
    with replaying(root, call), finder.writes_undone():
        args, kwargs = copied_arguments(call)
        outputs = _run_forward(root, call, (args, kwargs), finder)
        pairs = _cotangents(call, outputs)
        targets = trained_parameters(root)
        if others:
            # An earlier call may get its gradient from the arguments of this one.
            targets += [x for x in tensors_in(args, kwargs) if x.requires_grad and x.is_leaf]
        guilty, settled = _in_backward(targets, finder, pairs, outputs)
        if settled:
            return guilty
        guilty = _in_forward(finder, outputs)
        if guilty is not None:
            return guilty
        if not pairs:
            raise NoGradient(
                "the forward pass is clean; no gradients at the outputs were kept to look at "
                "backward with"
            )
        return fault_in_loss(call, outputs, others, loss_root)


def find_forward_operation(
    root: nn.Module, call: RecordedCall, budget: Budget
) -> tuple[GuiltyOperation | None, list[OutputKind]]:
    """Return the operation that made an output of this call non-finite, and the output kinds.

    Used for a call that no backward pass reached.
    """
    finder = _finder(root, call, budget)
    with replaying(root, call), finder.writes_undone():
        outputs = _run_forward(root, call, copied_arguments(call), finder)
        kinds = [(y.grad_fn.name(), tuple(y.shape)) for y in outputs if y.grad_fn is not None]
        return _in_forward(finder, outputs), kinds


def _finder(root: nn.Module, call: RecordedCall, budget: Budget) -> Finder:
    return Finder(module_names(root), call.number or CallNumber(0), call.caller, budget)


def _run_forward(
    root: nn.Module,
    call: RecordedCall,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    finder: Finder,
) -> list[Tensor]:
    """Run a call again under a finder that knows which of its inputs were already non-finite."""
    args, kwargs = given
    number = call.number or CallNumber(0)
    for tensor, event in _broken_before(root, number.micro_batch):
        finder.expect(tensor, event)
    for tensor, event in _broken_arguments(root, call, given, number):
        finder.expect(tensor, event)
    with finder:
        return run_model(module_of(root, call), args, kwargs)


def broken_before(root: nn.Module, call: RecordedCall) -> GuiltyOperation | None:
    """What was not finite before a call, as far as that can be seen without running it again."""
    number = call.number or CallNumber(0)
    given = (tuple(call.args), dict(call.kwargs))
    found = [event for _, event in _broken_before(root, number.micro_batch)]
    for tensor, event in _broken_arguments(root, call, given, number):
        if tensor.grad_fn is None:  # else another call may have made it
            found.append(event)
    return next((event.operation for event in found if event.certain), None)


def _in_backward(
    targets: Sequence[Tensor], finder: Finder, pairs: Sequence[Pair], outputs: Sequence[Tensor]
) -> tuple[GuiltyOperation | None, bool]:
    """The operation of backward that is guilty, and whether that settles the question.

    It is pulled from the last outputs; if that is clean, from the others too, in case they were
    used outside.
    """
    last = are_last([y for y, _ in pairs])
    outer = [pair for pair, is_last in zip(pairs, last, strict=True) if is_last]
    choices = [outer]
    if len(outer) < len(pairs):
        choices.append(list(pairs))
    for number, chosen in enumerate(choices):
        if not chosen or any(nonfinite_in(cotangent) for _, cotangent in chosen):
            return None, False
        with finder:
            gradients = pull(
                [y for y, _ in chosen],
                [cotangent for _, cotangent in chosen],
                targets,
                keep=number + 1 < len(choices),
            )
            guilty = finder.first(gradients)
        if guilty is not None:
            return _at_first(finder, guilty, outputs), True
    return None, True


def _in_forward(finder: Finder, outputs: Sequence[Tensor]) -> GuiltyOperation | None:
    """What made outputs non-finite; infinities that the model wrote on purpose are no fault."""
    certain = finder.first(outputs, certain=True)
    if certain is not None:
        return certain
    likely = finder.first(outputs)
    if likely is None:
        return None
    broken = any(nonfinite_in(y) == "nan" for y in outputs)
    return likely if broken or likely.phase == "before" else None


def _at_first(
    finder: Finder, guilty: GuiltyOperation | None, outputs: Sequence[Tensor]
) -> GuiltyOperation | None:
    """The forward operation, where backward trips over one that was not finite already."""
    before = finder.first(outputs, certain=True)
    if guilty is None or before is None:
        return guilty
    same = _identity(before) == _identity(guilty)
    return before if same else guilty


def _identity(operation: GuiltyOperation) -> tuple[str, str | None, str | None]:
    return operation.operation, operation.module, operation.place


def _cotangents(call: RecordedCall, outputs: Sequence[Tensor]) -> list[Pair]:
    """Outputs and the gradients at them.

    Where none were kept, a model that returns its loss is pulled from there.
    """
    kept = call.output_gradients
    if kept is not None and len(kept) == len(outputs) and any(c is not None for c in kept):
        pairs = {}
        for y, cotangent in zip(outputs, kept, strict=True):
            if cotangent is not None and y.requires_grad:
                pairs[id(y)] = (y, cotangent)
        return list(pairs.values())
    scalars = [y for y in outputs if y.requires_grad and y.numel() == 1]
    if len(scalars) != 1 or nonfinite_in(scalars[0]):
        return []
    return [(scalars[0], torch.ones_like(scalars[0]))]


def _broken_before(root: nn.Module, micro_batch: int) -> Iterator[tuple[Tensor, Event]]:
    """Parameters and buffers that are not finite before the first operation."""
    broken = [each for each in named_parameters(root) if nonfinite_in(each.tensor)]
    names = _listed([each.name for each in broken])
    for parameter in broken:
        yield (
            parameter.tensor,
            Event(
                GuiltyOperation(
                    "parameter",
                    "before",
                    module=parameter.name.rpartition(".")[0],
                    place=None,
                    source=None,
                    inputs=(summary(parameter.tensor),),
                    micro_batch=micro_batch,
                    detail=f"{names} not finite before the pass: the fault lies in an earlier step",
                )
            ),
        )
    for raw, buffer in root.named_buffers():
        state = nonfinite_in(buffer)
        if not state:
            continue
        name = clean_name(root, raw)
        operation = GuiltyOperation(
            "buffer",
            "before",
            module=name.rpartition(".")[0],
            place=None,
            source=None,
            inputs=(summary(buffer),),
            micro_batch=micro_batch,
            detail=f"{name} not finite before the pass",
        )
        yield buffer, Event(operation, certain=state == "nan")  # an infinite one may be a mask


def _broken_arguments(
    root: nn.Module, call: RecordedCall, given: tuple[tuple[Any, ...], Any], number: CallNumber
) -> Iterator[tuple[Tensor, Event]]:
    """Arguments with NaN or an infinity; -inf alone may be a mask."""
    parameters = list(inspect.signature(module_of(root, call).forward).parameters)
    of_part = f" of {call.part}" if call.part else ""
    for position, (path, tensor) in enumerate(tree_flatten_with_path(given)[0]):
        if not isinstance(tensor, Tensor) or not nonfinite_in(tensor):
            continue
        operation = GuiltyOperation(
            "input",
            "before",
            module=None,
            place=call.caller,
            source=source_of(call.caller),
            inputs=(summary(tensor),),
            micro_batch=number.micro_batch,
            detail=(
                f"argument {_argument_name(path, parameters)}{of_part}{_rows(root, call, position)}"
            ),
            call=number.named_call,
            calls=number.calls,
        )
        values = entries(tensor)
        certain = bool(values.isnan().any() or (values == float("inf")).any())
        yield tensor, Event(operation, certain)


def _argument_name(path: tuple[Any, ...], parameters: Sequence[str]) -> str:
    """What the model calls an argument, with its place inside where it is a container."""
    first = keystr(path[1:2])
    index = getattr(path[1], "idx", None)
    if getattr(path[0], "idx", None) == 0 and index is not None and index < len(parameters):
        first = parameters[index]
    return first.strip("[]'") + keystr(path[2:])


def _rows(root: nn.Module, call: RecordedCall, position: int) -> str:
    """The samples in which an argument is not finite, in words."""
    size = len(call.sample_ids) if call.sample_ids else None
    try:
        batch = find_samples(call.args, call.kwargs, size, None, module_of(root, call))
    except NotSeparable:
        return ""
    dim = batch.dims.get(position)
    tensor = batch.flat[position].detach()
    if dim is None:
        return ""
    if is_plain(tensor):
        rows = tensor.movedim(dim, 0).unflatten(0, (batch.batch, -1)).flatten(1)
        broken = (~torch.isfinite(rows)).any(1).nonzero().flatten().tolist()
    elif tensor.layout in (torch.sparse_coo, torch.sparse_csr) and tensor.shape[dim] == batch.batch:
        tensor = tensor.to_sparse_coo().coalesce()
        is_broken = ~torch.isfinite(tensor.values()).reshape(tensor._nnz(), -1).all(1)
        broken = tensor.indices()[dim][is_broken].unique().tolist()
    else:
        return ""
    if len(broken) == batch.batch:
        return ", all rows"
    plural = "s" if len(broken) > 1 else ""
    return f", row{plural} {_listed([str(row) for row in broken])}"


def _listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are.

    >>> _listed(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
