"""What a loss is by the operations that made it: a mean or a sum, of how much, times what.

Read from the graph, without touching any data but single factors, and those only where that waits
for no device.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from gradsight.core.devices import is_accelerator
from gradsight.core.layouts import is_in_memory

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
    there: Tensor | None = field(default=None, repr=False, compare=False)
    """What it was multiplied by beside that, on a device: a GradScaler's scale, a count."""


@dataclass(frozen=True, slots=True)
class _Factor:
    """What a node's value is multiplied by on its way to the loss."""

    number: float = 1.0
    there: Tensor | None = None

    def times(self, other: Tensor, is_product: bool) -> "_Factor | None":
        """With one more factor, or divisor; None where that leaves nothing to tell."""
        if is_accelerator(other.device):
            # It stays there: reading it would wait for the device.
            one = other.detach().reshape(())
            one = one if is_product else one.reciprocal()
            return _Factor(self.number, one if self.there is None else self.there * one)
        number = float(other)
        if not number or not math.isfinite(number):
            return None
        scaled = self.number * number if is_product else self.number / number
        return _Factor(scaled, self.there)


def form_of(loss: Tensor) -> LossForm:
    """How a loss was put together.

    >>> import torch
    >>> values = torch.ones(8, requires_grad=True)
    >>> form_of(values.mean() / 4)
    LossForm(factor=0.25, reduction='mean', entries=8)
    """
    return _form(source_of(loss.grad_fn, loss.output_nr), _Factor(), _FAR)


def source_of(node: Any, output: int) -> Any:
    """Return the operation that made an output of this node; None if there is none.

    DistributedDataParallel passes the outputs of its model through an operation of its own if it
    looks for unused parameters. The one before it is returned.
    """
    if node is not None and node.name() == "_DDPSinkBackward":
        node, output = node.next_functions[output]
    return node


def _form(node: Any, factor: _Factor, far: int) -> LossForm:
    if node is None or far == 0:
        return _unknown(factor)
    name = node.name()
    if name in ("MulBackward0", "DivBackward0"):
        inner, other = _scaled(node)
        scaled = None if other is None else factor.times(other, name == "MulBackward0")
        return _unknown(factor) if scaled is None else _form(inner, scaled, far - 1)
    if name == "AddBackward0":
        terms = [_form(source_of(*each), factor, far - 1) for each in node.next_functions]
        return _largest(terms, factor)
    if name.startswith(_PASSING) and node.next_functions:
        return _form(source_of(*node.next_functions[0]), factor, far - 1)
    return _reduced(node, name, factor)


def _unknown(factor: _Factor) -> LossForm:
    return LossForm(factor.number, there=factor.there)


def _largest(terms: list[LossForm], factor: _Factor) -> LossForm:
    """The term of a sum that counts most."""
    known = [form for form in terms if form.reduction is not None]
    if any(form.there is not factor.there for form in known):
        return _unknown(factor)  # which one that is, only the device knows
    return max(known, key=lambda form: abs(form.factor), default=_unknown(factor))


def _scaled(node: Any) -> tuple[Any, Tensor | None]:
    """What is multiplied or divided, and by which number."""
    sources = [source_of(*each) for each in node.next_functions]
    for saved, inner in (("_saved_other", sources[0]), ("_saved_self", sources[-1])):
        value = getattr(node, saved, None)
        if not isinstance(value, Tensor) or value.numel() != 1 or value.requires_grad:
            continue
        if inner is not None and is_in_memory(value):
            return inner, value
    return None, None


def _reduced(node: Any, name: str, factor: _Factor) -> LossForm:
    if name.startswith("MeanBackward"):
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        return LossForm(factor.number, "mean", math.prod(sizes), factor.there)
    if name == "SumBackward0":
        sizes = node._saved_self_sym_sizes
        return LossForm(factor.number, "sum", math.prod(sizes), factor.there)
    reduction = getattr(node, "_saved_reduction", None)
    entries = getattr(node, "_saved_target", None)
    count = entries.numel() if isinstance(entries, Tensor) else 0
    if reduction == _MEAN:
        return LossForm(factor.number, "mean", count, factor.there)
    if reduction == _SUM:
        return LossForm(factor.number, "sum", count, factor.there)
    return _unknown(factor)
