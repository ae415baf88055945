"""The guilty operation of a pass: run again, forward and backward, under the eyes of a Finder."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from gradsight.core.beside import arguments, replaying
from gradsight.core.calls import RecordedCall
from gradsight.core.parameters import clean_name, named_parameters
from gradsight.core.samples import NotSeparable, tell_batch
from gradsight.incidents.diagnosis.budget import Budget
from gradsight.incidents.diagnosis.finder import Event, Finder
from gradsight.incidents.diagnosis.loss import outside
from gradsight.incidents.diagnosis.numbers import state_of, summary
from gradsight.incidents.diagnosis.places import module_names, source_of
from gradsight.incidents.diagnosis.rerun import (
    NoGradient,
    Rerun,
    call,
    call_step,
    ends,
    parameters_of,
    pull,
)
from gradsight.values.diagnoses import GuiltyOperation

_NAMED = 3
Pair = tuple[Tensor, Tensor]
"""An output and the gradient that came back to it."""


def find_operation(
    root: nn.Module,
    one: RecordedCall,
    number: int,
    budget: Budget,
    *,
    loss_root: Tensor | None = None,
    rerun: Rerun | None = None,
) -> GuiltyOperation | None:
    """The operation that made this pass's gradient non-finite; None where the pass is innocent."""
    finder = Finder(module_names(root), number, one.caller, budget)
    with replaying(root, one, finder):
        args, kwargs = arguments(one)
        for tensor, event in _before_the_pass(root, one, args, kwargs, number):
            finder.expect(tensor, event)
        if rerun is not None:
            return _whole_step(root, number, finder, rerun)
        with finder:
            outputs = call(root, args, kwargs)
        return _judge(root, one, number, finder, outputs, loss_root)


def _judge(
    root: nn.Module,
    one: RecordedCall,
    number: int,
    finder: Finder,
    outputs: Sequence[Tensor],
    loss_root: Tensor | None,
) -> GuiltyOperation | None:
    """Pull from the last outputs; if that is clean, from the others too, in case they were used
    outside.
    """
    pairs = _cotangents(one, outputs)
    last = ends([y for y, _ in pairs])
    outer = [pair for pair, end in zip(pairs, last, strict=True) if end]
    for chosen in (outer, pairs) if len(outer) < len(pairs) else (outer,):
        if not chosen or any(state_of(c) for _, c in chosen):
            break
        if (guilty := _backward(root, finder, chosen, keep=chosen is not pairs)) is not None:
            return _at_first(finder, guilty, outputs)
    else:
        return None
    if (forward := _forward(finder, outputs)) is not None:
        return forward
    if not pairs:
        raise NoGradient(
            "the forward pass is clean; no gradients at the outputs were kept to look at backward with"
        )
    return outside(one, outputs, number, loss_root)


def _backward(
    root: nn.Module, finder: Finder, pairs: Sequence[Pair], keep: bool
) -> GuiltyOperation | None:
    with finder:
        return finder.first(
            pull([y for y, _ in pairs], [c for _, c in pairs], parameters_of(root), keep=keep)
        )


def _forward(finder: Finder, outputs: Sequence[Tensor]) -> GuiltyOperation | None:
    """What made outputs non-finite; infinities that the model wrote into them on purpose are no
    fault.
    """
    if (certain := finder.first(outputs, certain=True)) is not None:
        return certain
    likely = finder.first(outputs)
    broken = any(state_of(y) == "nan" for y in outputs)
    return likely if likely is not None and (broken or likely.phase == "before") else None


def _whole_step(
    root: nn.Module, number: int, finder: Finder, rerun: Rerun
) -> GuiltyOperation | None:
    """The same with the loss: whatever makes the gradient non-finite is seen."""
    finder.whole_step = True
    with finder:
        loss = call_step(rerun, root, number)
        found = pull([loss], [torch.ones_like(loss)], parameters_of(root))
    return _at_first(finder, finder.first(found), [loss]) or finder.first([loss])


def _at_first(
    finder: Finder, guilty: GuiltyOperation | None, outputs: Sequence[Tensor]
) -> GuiltyOperation | None:
    """Where backward trips over an operation that was not finite in forward already, the forward is
    what is meant.
    """
    before = finder.first(outputs, certain=True)
    if guilty is None or before is None:
        return guilty
    same = (before.operation, before.module, before.place) == (
        guilty.operation,
        guilty.module,
        guilty.place,
    )
    return before if same else guilty


def _cotangents(one: RecordedCall, outputs: Sequence[Tensor]) -> list[Pair]:
    """Outputs and the gradients at them; where none were kept, a model that returns its loss is
    pulled from there.
    """
    kept = one.output_gradients
    if kept is not None and len(kept) == len(outputs) and any(c is not None for c in kept):
        given = zip(outputs, kept, strict=True)
        return list({id(y): (y, c) for y, c in given if c is not None and y.requires_grad}.values())
    scalars = [y for y in outputs if y.requires_grad and y.numel() == 1]
    return (
        [(y, torch.ones_like(y)) for y in scalars]
        if len(scalars) == 1 and not state_of(scalars[0])
        else []
    )


def _before_the_pass(
    root: nn.Module, one: RecordedCall, args: Sequence[Any], kwargs: Any, number: int
) -> Iterator[tuple[Tensor, Event]]:
    """What is not finite before the first operation: parameters, buffers, arguments."""
    bad = [each for each in named_parameters(root) if state_of(each.tensor)]
    names = ", ".join(each.name for each in bad[:_NAMED]) + (
        f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    )
    for each in bad:
        detail = f"{names} not finite before the pass: the fault lies in an earlier step"
        module = each.name.rpartition(".")[0]
        yield each.tensor, _came("parameter", module, None, each.tensor, number, detail)
    for name, buffer in root.named_buffers():
        if state := state_of(buffer):
            name = clean_name(root, name)
            event = _came(
                "buffer",
                name.rpartition(".")[0],
                None,
                buffer,
                number,
                f"{name} not finite before the pass",
            )
            yield buffer, Event(event.operation, certain=state == "nan")
    yield from _arguments(root, one, args, kwargs, number)


def _arguments(
    root: nn.Module, one: RecordedCall, args: Sequence[Any], kwargs: Any, number: int
) -> Iterator[tuple[Tensor, Event]]:
    """Arguments with NaN or an infinity; -inf alone may be a mask."""
    positional = list(inspect.signature(root.forward).parameters)
    for position, (path, tensor) in enumerate(
        tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    ):
        if not isinstance(tensor, Tensor) or not state_of(tensor):
            continue
        in_args, index = getattr(path[0], "idx", None) == 0, getattr(path[1], "idx", None)
        first = (
            positional[index]
            if in_args and index is not None and index < len(positional)
            else keystr(path[1:2])
        )
        name = first.strip("[]'") + keystr(path[2:])
        detail = f"argument {name}{_rows(root, one, position)}"
        certain = bool(tensor.isnan().any() or (tensor == float("inf")).any())
        came = _came("input", None, one.caller, tensor, number, detail)
        yield tensor, Event(came.operation, certain)


def _rows(root: nn.Module, one: RecordedCall, position: int) -> str:
    """The samples in which an argument is not finite, in words."""
    try:
        call_ = tell_batch(
            one.args, one.kwargs, len(one.sample_ids) if one.sample_ids else None, None, root
        )
    except NotSeparable:
        return ""
    if (dim := call_.dims.get(position)) is None:
        return ""
    rows = call_.flat[position].detach().movedim(dim, 0).unflatten(0, (call_.batch, -1)).flatten(1)
    bad = (~torch.isfinite(rows)).any(1).nonzero().flatten().tolist()
    if len(bad) == call_.batch:
        return ", all rows"
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return f", row{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:_NAMED]))}{more}"


def _came(
    what: str, module: str | None, place: str | None, tensor: Tensor, number: int, detail: str
) -> Event:
    return Event(
        GuiltyOperation(
            what, "before", module, place, source_of(place), (summary(tensor),), number, detail
        )
    )
