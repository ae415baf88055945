"""What a loss is by the operations that made it: a mean or a sum, of how much, times what.

Read from the graph, without touching any data but single factors, and those only where that waits
for no device.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gradsight.core.devices import is_accelerator
from gradsight.core.layouts import is_in_memory
from gradsight.core.shards import is_sharded

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
    weight: Tensor | None = field(default=None, repr=False, compare=False)
    """The sum of the weights of a sum's entries, for example of a mask."""
    operation: str = field(default="", repr=False, compare=False)
    """The operation that reduced the entries."""


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


def nodes_below(nodes: Iterable[Any], most: int | None = None) -> Iterator[Any]:
    """Yield autograd nodes and all nodes that their gradients flow to, each once.

    nodes: entries that are None are ignored. most: the largest number of nodes; None: no limit.
    """
    waiting = [node for node in dict.fromkeys(nodes) if node is not None]
    known = set(waiting)
    while waiting and (most is None or len(known) <= most):
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                waiting.append(following)


def saved(node: Any, name: str) -> Any:
    """Return the value that autograd saved for a node under this name; None if not available."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is not None:
        return None  # a hook of the script, which may compute, or run once only
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # it was freed, or changed in place since
        return None


def _form(node: Any, factor: _Factor, far: int) -> LossForm:
    if node is None or far == 0:
        return _unknown(factor)
    name = node.name()
    if name in ("MulBackward0", "DivBackward0"):
        inner, other = _scaled(node)
        scaled = None if other is None else factor.times(other, name == "MulBackward0")
        return _unknown(factor) if scaled is None else _form(inner, scaled, far - 1)
    if name == "AddBackward0":
        classes = _without_smoothing(node)
        if classes is not None:
            return _form(classes, factor, far - 1)
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
    inner, other = _operands(node)
    return (inner, other) if other is not None and other.numel() == 1 else (None, None)


def _operands(node: Any) -> tuple[Any, Tensor | None]:
    """Return the differentiable input of a product or quotient, and its constant operand."""
    sources = [source_of(*each) for each in node.next_functions]
    for name, inner in (("other", sources[0]), ("self", sources[-1])):
        value = saved(node, name)
        if not isinstance(value, Tensor) or value.requires_grad or inner is None:
            continue
        if is_in_memory(value):
            return inner, value
    return None, None


def _without_smoothing(node: Any) -> Any:
    """Return the node of the NLL loss inside a cross-entropy with label smoothing, or None.

    torch computes (1 - e) * NLL + (e / classes) * (the loss summed over all classes).
    """
    ends = [source_of(*each) for each in node.next_functions]
    if len(ends) != 2 or any(each is None or each.name() != "MulBackward1" for each in ends):
        return None
    of_target, of_all = (source_of(*each.next_functions[0]) for each in ends)
    if of_target is None or not of_target.name().startswith("NllLoss"):
        return None
    for _ in range(_FAR):
        if of_all is None or of_all.name() == "SumBackward1" or not of_all.next_functions:
            break
        of_all = source_of(*of_all.next_functions[0])
    sizes = getattr(of_all, "_saved_self_sym_sizes", ())
    share, share_of_each = (saved(each, "other") for each in ends)
    if not isinstance(share, float) or not isinstance(share_of_each, float):
        return None
    classes = math.prod(sizes[1:2] or sizes)
    return of_target if math.isclose(share + share_of_each * classes, 1.0) else None


def _reduced(node: Any, name: str, factor: _Factor) -> LossForm:
    if name.startswith("MeanBackward"):
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        return _made("mean", math.prod(sizes), name, factor)
    if name == "SumBackward0":
        count = math.prod(node._saved_self_sym_sizes)
        return _made("sum", count, name, factor, partial(_weight, node, count))
    reduction = getattr(node, "_saved_reduction", None)
    entries = saved(node, "target")
    count = entries.numel() if isinstance(entries, Tensor) else 0
    if reduction == _MEAN:
        return _made("mean", count, name, factor)
    if reduction == _SUM:
        weight = partial(saved, node, "total_weight")  # how many labels count
        return _made("sum", count, name, factor, weight)
    return _unknown(factor)


def _made(
    reduction: Literal["mean", "sum"],
    entries: int,
    operation: str,
    factor: _Factor,
    weight: Callable[[], Tensor | None] | None = None,
) -> LossForm:
    is_divided = factor.there is not None or factor.number != 1.0
    total = weight() if weight is not None and is_divided else None
    return LossForm(factor.number, reduction, entries, factor.there, total, operation)


def _weight(node: Any, entries: int) -> Tensor | None:
    """Return the sum of the weights of a sum's entries; None if they are unknown."""
    source = source_of(*node.next_functions[0])
    while source is not None and source.name().startswith(_PASSING) and source.next_functions:
        source = source_of(*source.next_functions[0])
    if source is None or source.name() != "MulBackward0":
        return torch.tensor(float(entries), device="cpu")
    weights = _operands(source)[1]
    if weights is None or not weights.numel() or is_sharded(weights):
        return None
    # Broadcasting repeats weights that have fewer entries.
    return weights.detach().sum(dtype=torch.float32) * (entries / weights.numel())
