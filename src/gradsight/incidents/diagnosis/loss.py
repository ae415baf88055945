"""A fault outside the model: between its outputs and backward(), where no call can be run again."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsight.core.calls import RecordedCall
from gradsight.incidents.diagnosis.finder import forward_name
from gradsight.incidents.diagnosis.numbers import nonfinite_in, summary
from gradsight.incidents.diagnosis.places import source_of
from gradsight.values.diagnoses import GuiltyOperation, TensorSummary

RISKY = frozenset(
    {
        "log", "log2", "log10", "log1p", "xlogy", "div", "reciprocal", "sqrt", "rsqrt", "pow",
        "exp", "expm1", "norm", "linalg_vector_norm", "acos", "asin", "atan2", "acosh", "atanh",
        "tan", "lgamma", "cdist", "logsumexp", "prod", "std", "var", "erfinv",
    }
)  # fmt: skip
"""Operations that make something non-finite out of finite numbers, or whose derivative does."""
STEEP = frozenset(
    {
        "sqrt", "pow", "norm", "linalg_vector_norm", "std", "var", "acos", "asin", "atan2",
        "cdist", "prod",
    }
)  # fmt: skip
"""Those of them that are finite where their derivative is not."""
KNOWN: dict[str, Any] = {
    "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp, "expm1": torch.expm1,
    "reciprocal": torch.reciprocal, "neg": torch.neg, "abs": torch.abs, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "relu": torch.relu, "acos": torch.acos, "asin": torch.asin,
    "atanh": torch.atanh, "acosh": torch.acosh, "square": torch.square,
}  # fmt: skip
"""Operations that can be computed again from their only input."""
_MOST_NODES = 10_000


@dataclass(frozen=True, slots=True)
class Guess:
    """The operation of the loss that is blamed, and how surely."""

    operation: str
    detail: str
    inputs: tuple[TensorSummary, ...] = ()


def fault_in_loss(
    call: RecordedCall, outputs: Sequence[Tensor], number: int, loss_root: Tensor | None
) -> GuiltyOperation:
    """The guilty operation between the model's outputs and backward, as far as it can be told.

    To be asked where the outputs are finite and the gradients at them are not.
    """
    place = call.backward_caller or call.caller
    guess = _guess(call, outputs, loss_root)
    inputs = guess.inputs
    if not inputs:
        pairs = zip(outputs, call.output_gradients or (), strict=True)
        inputs = tuple(summary(y) for y, c in pairs if c is not None and nonfinite_in(c))
    return GuiltyOperation(
        guess.operation, "loss", None, place, source_of(place), inputs, number, guess.detail
    )


def _guess(call: RecordedCall, outputs: Sequence[Tensor], loss_root: Tensor | None) -> Guess:
    """The operation that is sure, else the likely ones, else only that it is the loss."""
    where = _told_of_outputs(outputs)
    stops = [node for node in call.output_nodes or () if node is not None]
    if loss_root is None or not stops:
        return Guess("loss", where)
    nodes = _between(loss_root.grad_fn, stops)
    if not nodes:
        return Guess("loss", where)
    state = nonfinite_in(loss_root)
    if state:
        where += f"; the loss is {state}"
    else:
        where += "; the loss is finite, so the fault is in a derivative"
    for node, value in _again(nodes, call.output_nodes or (), outputs):
        if _breaks(_function(node), value):
            return Guess(forward_name(node.name()), where, (summary(value),))
    risky = [forward_name(node.name()) for node in reversed(nodes) if _is_risky(node)]
    likely = list(dict.fromkeys(risky))
    if not state:  # what is infinite itself would have shown in the loss
        likely = [name for name in likely if name in STEEP] or likely
    if len(likely) == 1:
        return Guess(likely[0], f"likely: no other operation of the loss can do it; {where}")
    if likely:
        where += f"; likely {' or '.join(likely)}"
    return Guess("loss", where)


def _told_of_outputs(outputs: Sequence[Tensor]) -> str:
    if any(nonfinite_in(y) for y in outputs):
        return (
            "the outputs hold infinities that the model wrote on purpose, "
            "the gradients that came back are not finite"
        )
    return "the outputs are finite, the gradients that came back are not"


def _is_risky(node: Any) -> bool:
    name = forward_name(node.name())
    if name == "pow" and isinstance(node._saved_exponent, int | float):
        return bool(node._saved_exponent < 1)
    return name in RISKY


def _between(root: Any, stops: Sequence[Any]) -> list[Any]:
    """The autograd nodes from the loss down to the outputs, nearest to the loss first.

    None if the outputs are not reached.
    """
    nodes: dict[Any, None] = {root: None}
    waiting = [root]
    reached = root in stops
    while waiting and len(nodes) < _MOST_NODES:
        for node, _ in waiting.pop(0).next_functions:
            reached = reached or node in stops
            if node is not None and node not in nodes and node not in stops:
                nodes[node] = None
                waiting.append(node)
    if not reached:
        return []
    return [node for node in nodes if node not in stops]


def _again(
    nodes: Sequence[Any], stops: Sequence[Any], outputs: Sequence[Tensor]
) -> list[tuple[Any, Tensor]]:
    """Nodes with their input, where known operations compute it from the outputs; nearest first."""
    # Backward has freed what the nodes had saved: their inputs are computed again.
    values = {stop: y.detach() for stop, y in zip(stops, outputs, strict=False) if stop is not None}
    pairs = []
    for node in reversed(nodes):
        function = _function(node)
        sources = [source for source, _ in node.next_functions if source is not None]
        if function is not None and len(sources) == 1 and sources[0] in values:
            pairs.append((node, values[sources[0]]))
            values[node] = function(values[sources[0]])
    return pairs


def _function(node: Any) -> Any:
    """The function of its only input that a node computed; None where that is not known."""
    # Of what a node has saved, settings outlive backward, tensors do not.
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
    if nonfinite_in(value):
        return False
    x = value.detach().clone().requires_grad_()
    y = function(x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return bool(nonfinite_in(y) or nonfinite_in(slope))
