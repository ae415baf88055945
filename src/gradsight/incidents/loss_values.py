"""Read the operands of a loss that is not finite, before backward frees them.

Backward frees the tensors that autograd saved in the forward pass, and the loss cannot be run
again. So these tensors are read before backward, at the first loss that is not finite. This happens
only on the CPU, where testing the loss needs no sync.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsight.core.calls import suspended
from gradsight.core.layouts import is_in_memory, is_plain
from gradsight.core.loss_graph import saved
from gradsight.core.shards import is_sharded
from gradsight.incidents.diagnosis.finder import forward_name
from gradsight.incidents.diagnosis.numbers import nonfinite_in, summary
from gradsight.values.diagnoses import TensorSummary

KNOWN: dict[str, Any] = {
    "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp, "expm1": torch.expm1,
    "reciprocal": torch.reciprocal, "neg": torch.neg, "abs": torch.abs, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "relu": torch.relu, "acos": torch.acos, "asin": torch.asin,
    "atanh": torch.atanh, "acosh": torch.acosh, "square": torch.square,
}  # fmt: skip
"""Operations that can be computed again from their only input."""
_TWO = {
    "mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"),
    "mul": ("self", "other"), "div": ("self", "other"), "atan2": ("self", "other"),
    "pow": ("self", "exponent"), "mse_loss": ("self", "target"), "l1_loss": ("self", "target"),
    "smooth_l1_loss": ("self", "target"), "huber_loss": ("self", "target"),
    "binary_cross_entropy": ("self", "target"),
    "binary_cross_entropy_with_logits": ("self", "target"), "xlogy": ("self", "other"),
}  # fmt: skip
"""Operations of two operands, and what autograd calls these."""
_MOST_ENTRIES = 10**8


@dataclass(frozen=True, slots=True)
class LossValues:
    """The values of a loss that is not finite, as far as autograd has saved them, by its nodes."""

    states: dict[Any, str] = field(default_factory=dict)
    """Whether an operation made a NaN ("nan"), an infinity ("inf") or neither ("")."""
    inputs: dict[Any, TensorSummary] = field(default_factory=dict)
    """First known operand of each operation whose result is not finite."""
    elsewhere: dict[Any, TensorSummary] = field(default_factory=dict)
    """An operand that is not finite, and that no gradient flows to: labels, weights, constants."""
    zero_divisors: dict[Any, TensorSummary] = field(default_factory=dict)
    """What an operation divided by, where that is 0 somewhere."""


def loss_values(loss: Tensor, nodes: Sequence[Any]) -> LossValues:
    """Return what these autograd nodes have saved; the nodes are in order of creation."""
    found = LossValues()
    values: dict[Any, Tensor] = {loss.grad_fn: loss.detach()}
    with suspended(), torch.no_grad():
        for node in nodes:
            _read(node, values, found)
        for node in nodes:
            _compute(node, values)
        for node in nodes:
            if node in values:
                found.states[node] = nonfinite_in(values[node])
            edges = node.next_functions
            given = [values[source] for source, output in edges if source in values and not output]
            if given and found.states.get(node):
                found.inputs[node] = summary(given[0])
    return found


def _read(node: Any, values: dict[Any, Tensor], found: LossValues) -> None:
    """Note the operands and the result of one operation."""
    name = forward_name(node.name())
    result = saved(node, "result")
    if _can_be_read(result):
        values.setdefault(node, result.detach())
    names = _TWO.get(name, ("self",) if function_of(node) is not None else ())
    for place, operand in enumerate(names):
        value = saved(node, operand)
        if not _can_be_read(value):
            continue
        source, output = node.next_functions[place] if place < len(node.next_functions) else (0, 0)
        if source == 0 or source is None:
            if nonfinite_in(value):
                found.elsewhere[node] = summary(value)
        elif output == 0:
            values.setdefault(source, value.detach())
        if name == "div" and operand == "other" and bool((value == 0).any()):
            found.zero_divisors[node] = summary(value)


def _can_be_read(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and is_plain(value)
        and is_in_memory(value)
        # Reading a sharded tensor may need all ranks.
        and not is_sharded(value)
        and 0 < value.numel() < _MOST_ENTRIES
    )


def _compute(node: Any, values: dict[Any, Tensor]) -> None:
    """Compute the result of an operation from operands that are known."""
    sources = [source for source, _ in node.next_functions]
    if node in values or not sources or any(source not in values for source in sources):
        return
    if any(output for _, output in node.next_functions):
        return  # of an operation with several results, only the first is known
    function = function_of(node)
    name = forward_name(node.name())
    if function is None and len(sources) == 2 and name in ("mul", "div"):
        function = torch.mul if name == "mul" else torch.div
    if function is not None:
        values[node] = function(*[values[source] for source in sources])


def function_of(node: Any) -> Any:
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
