"""A fault outside the model: between its outputs and backward(), where there is no pass to run
again.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsight.core.calls import RecordedCall
from gradsight.incidents.diagnosis.finder import forward_name
from gradsight.incidents.diagnosis.numbers import state_of, summary
from gradsight.incidents.diagnosis.places import source_of
from gradsight.values.diagnoses import GuiltyOperation

RISKY = frozenset(
    {
        "log",
        "log2",
        "log10",
        "log1p",
        "xlogy",
        "div",
        "reciprocal",
        "sqrt",
        "rsqrt",
        "pow",
        "exp",
        "expm1",
        "norm",
    }
    | {
        "linalg_vector_norm",
        "acos",
        "asin",
        "atan2",
        "acosh",
        "atanh",
        "tan",
        "lgamma",
        "cdist",
        "logsumexp",
        "prod",
    }
    | {"std", "var", "erfinv"}
)
"""Operations that make something non-finite out of finite numbers, or whose derivative does."""
STEEP = frozenset(
    {
        "sqrt",
        "pow",
        "norm",
        "linalg_vector_norm",
        "std",
        "var",
        "acos",
        "asin",
        "atan2",
        "cdist",
        "prod",
    }
)
"""Those of them that are finite where their derivative is not."""
KNOWN: dict[str, Any] = {
    "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "exp": torch.exp, "expm1": torch.expm1, "reciprocal": torch.reciprocal, "neg": torch.neg, "abs": torch.abs,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu, "acos": torch.acos, "asin": torch.asin,
    "atanh": torch.atanh, "acosh": torch.acosh, "square": torch.square,
}  # fmt: skip
"""Operations that can be computed again from their only input."""
_MOST_NODES = 10_000


def outside(
    one: RecordedCall, outputs: Sequence[Tensor], number: int, loss_root: Tensor | None
) -> GuiltyOperation:
    """The model's outputs are finite and the gradients at them are not: what lies between, as far
    as it can be told.
    """
    place = one.backward_caller or one.caller
    bad = [
        y
        for y, c in zip(outputs, one.output_gradients or (), strict=True)
        if c is not None and state_of(c)
    ]
    operation, detail, inputs = _tell(one, outputs, loss_root)
    return GuiltyOperation(
        operation,
        "loss",
        None,
        place,
        source_of(place),
        inputs or tuple(summary(y) for y in bad),
        number,
        detail,
    )


def _tell(
    one: RecordedCall, outputs: Sequence[Tensor], loss_root: Tensor | None
) -> tuple[str, str, tuple[Any, ...]]:
    """Operation, remark, inputs: the one that is sure, else the likely ones, else only that it is
    the loss.
    """
    meant = any(state_of(y) for y in outputs)
    where = (
        "the outputs hold infinities that the model wrote on purpose"
        if meant
        else "the outputs are finite"
    )
    where += (
        ", the gradients that came back are not finite"
        if meant
        else ", the gradients that came back are not"
    )
    stops = [node for node in one.output_nodes or () if node is not None]
    nodes = _between(loss_root.grad_fn, stops) if loss_root is not None and stops else []
    if loss_root is None or not nodes:
        return "loss", where, ()
    state = state_of(loss_root)
    where += (
        f"; the loss is {state}"
        if state
        else "; the loss is finite, so the fault is in a derivative"
    )
    for node, value in _again(nodes, one.output_nodes or (), outputs):
        if _breaks(_function(node), value):
            return forward_name(node.name()), where, (summary(value),)
    likely = list(
        dict.fromkeys(forward_name(node.name()) for node in reversed(nodes) if _is_risky(node))
    )
    if not state:  # what is infinite itself would have shown in the loss
        likely = [name for name in likely if name in STEEP] or likely
    if len(likely) == 1:
        return likely[0], f"likely: no other operation of the loss can do it; {where}", ()
    return "loss", f"{where}; likely {' or '.join(likely)}" if likely else where, ()


def _is_risky(node: Any) -> bool:
    name = forward_name(node.name())
    if name == "pow" and isinstance(exponent := node._saved_exponent, int | float):
        return exponent < 1
    return name in RISKY


def _between(root: Any, stops: Sequence[Any]) -> list[Any]:
    """The autograd nodes from the loss down to the model's outputs, nearest to the loss first; none
    if they are not reached.
    """
    found: dict[Any, None] = {root: None}
    queue, reached = [root], root in stops
    while queue and len(found) < _MOST_NODES:
        for node, _ in queue.pop(0).next_functions:
            reached = reached or node in stops
            if node is not None and node not in found and node not in stops:
                found[node] = None
                queue.append(node)
    return [node for node in found if node not in stops] if reached else []


def _again(
    nodes: Sequence[Any], stops: Sequence[Any], outputs: Sequence[Tensor]
) -> list[tuple[Any, Tensor]]:
    """Nodes whose input can be computed from the outputs by known operations, with that input,
    nearest to the outputs first.
    """
    values = {stop: y.detach() for stop, y in zip(stops, outputs, strict=False) if stop is not None}
    found = []
    for node in reversed(nodes):
        function = _function(node)
        sources = [source for source, _ in node.next_functions if source is not None]
        if function is not None and len(sources) == 1 and sources[0] in values:
            found.append((node, values[sources[0]]))
            values[node] = function(values[sources[0]])
    return found


def _function(node: Any) -> Any:
    """What a node computed, of its only input; None where that is not known. Settings outlive
    backward, tensors do not.
    """
    name = forward_name(node.name())
    if name in KNOWN:
        return KNOWN[name]
    if name in {"softmax", "log_softmax"}:
        return partial(getattr(torch, name), dim=_signed(node._saved_dim))
    if name == "select":
        return partial(torch.select, dim=_signed(node._saved_dim), index=_signed(node._saved_index))
    if name == "pow" and isinstance(node._saved_exponent, int | float):
        return partial(torch.pow, exponent=node._saved_exponent)
    if name == "clamp" and node.name() == "ClampBackward1":  # the one whose limits are numbers
        return partial(torch.clamp, min=node._saved_min, max=node._saved_max)
    return None


def _signed(number: int) -> int:
    """Autograd shows negative settings as large ones."""
    return number - 2**64 if number >= 2**63 else number


def _breaks(function: Any, value: Tensor) -> bool:
    """Whether the operation or its derivative is not finite at this finite value."""
    if state_of(value):
        return False
    x = value.detach().clone().requires_grad_()
    y = function(x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return bool(state_of(y) or state_of(slope))
