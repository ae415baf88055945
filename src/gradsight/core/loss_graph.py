"""What a loss is by the operations that made it: a mean or a sum, of how much, times what.

Read from the graph, without touching any data but single factors.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

_FAR = 12
_MEAN, _SUM = 1, 2
_PASSING = ("View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Neg", "Clone", "Select", "Alias")
"""Operations that leave one number what it is, or turn its sign."""


@dataclass(frozen=True, slots=True)
class LossForm:
    """A loss as factor times the mean, or the sum, of so many entries."""

    factor: float
    reduction: Literal["mean", "sum"] | None = None
    """None where it is neither."""
    entries: int = 0


def form_of(loss: Tensor) -> LossForm:
    """How a loss was put together.

    >>> import torch
    >>> values = torch.ones(8, requires_grad=True)
    >>> form_of(values.mean() / 4)
    LossForm(factor=0.25, reduction='mean', entries=8)
    """
    return _form(loss.grad_fn, 1.0, _FAR)


def _form(node: Any, factor: float, far: int) -> LossForm:
    if node is None or far == 0:
        return LossForm(factor)
    name = node.name()
    if name in ("MulBackward0", "DivBackward0"):
        inner, other = _scaled(node)
        if inner is None or other is None:
            return LossForm(factor)
        scaled = factor * other if name == "MulBackward0" else factor / other
        return _form(inner, scaled, far - 1)
    if name == "AddBackward0":
        forms = [_form(each, factor, far - 1) for each, _ in node.next_functions]
        known = [form for form in forms if form.reduction is not None]
        return max(known, key=lambda form: abs(form.factor), default=LossForm(factor))
    if name.startswith(_PASSING) and node.next_functions:
        return _form(node.next_functions[0][0], factor, far - 1)
    return _reduced(node, name, factor)


def _scaled(node: Any) -> tuple[Any, float | None]:
    """What is multiplied or divided, and by which number."""
    sources = [source for source, _ in node.next_functions]
    for saved, inner in (("_saved_other", sources[0]), ("_saved_self", sources[-1])):
        value = getattr(node, saved, None)
        is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad
        if is_number and inner is not None and value is not None:
            number = float(value)
            return (inner, number) if number and math.isfinite(number) else (None, None)
    return None, None


def _reduced(node: Any, name: str, factor: float) -> LossForm:
    if name.startswith("MeanBackward"):
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        return LossForm(factor, "mean", math.prod(sizes))
    if name == "SumBackward0":
        return LossForm(factor, "sum", math.prod(node._saved_self_sym_sizes))
    reduction = getattr(node, "_saved_reduction", None)
    entries = getattr(node, "_saved_target", None)
    count = entries.numel() if isinstance(entries, Tensor) else 0
    if reduction == _MEAN:
        return LossForm(factor, "mean", count)
    if reduction == _SUM:
        return LossForm(factor, "sum", count)
    return LossForm(factor)
