"""What a loss would be if the model knew nothing.

Read from the operation that made it, without touching any data.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsight.core.devices import is_accelerator
from gradsight.core.layouts import is_in_memory
from gradsight.core.loss_graph import source_of

_MEAN, _SUM = 1, 2
_DEPTH = 4
"""Multiplications and divisions after the loss itself that are followed.

By a GradScaler, for accumulation, by a weight.
"""


def loss_of_a_guess(loss: Tensor) -> float | Tensor | None:
    """The cross-entropy of equal probabilities, times what it was multiplied by since.

    None for any other loss; a tensor where a factor is on a device, which nobody waits for.

    >>> import torch
    >>> logits, labels = torch.zeros(8, 5, requires_grad=True), torch.arange(8) % 5
    >>> loss = torch.nn.functional.cross_entropy(logits, labels) / 4
    >>> round(loss_of_a_guess(loss), 4), round(math.log(5) / 4, 4)
    (0.4024, 0.4024)
    """
    # The graph knows the shape of the logits and every factor; no data is read, so nothing waits.
    node, factor = _behind_factors(loss)
    if node is None:
        return None
    chance = _chance(node, node.name())
    return None if chance is None else chance * factor


def _behind_factors(loss: Tensor) -> tuple[Any, float | Tensor]:
    """The operation that made a loss, and what that was multiplied by since."""
    node: Any = source_of(loss.grad_fn, loss.output_nr)
    factor: float | Tensor = 1.0
    for _ in range(_DEPTH):
        if node is None:
            return None, 1.0
        name = node.name()
        if name not in ("MulBackward0", "DivBackward0"):
            return node, factor
        other = node._saved_other
        if other is None or other.numel() != 1 or other.requires_grad or not is_in_memory(other):
            return None, 1.0
        other = _factor(other)
        if isinstance(other, float) and other == 0:  # nothing counts: there is nothing to guess
            return None, 1.0
        factor = factor * other if name == "MulBackward0" else factor / other
        node = source_of(*node.next_functions[0])
    return None, 1.0


@dataclass(frozen=True, slots=True)
class TargetCounts:
    """How often each class is a target of one loss; still on the device."""

    counts: Tensor
    factor: float | Tensor
    """What the loss was multiplied by."""


def target_counts(loss: Tensor) -> TargetCounts | None:
    """Of a mean cross-entropy of classes, None for any other loss; nothing waits for the device."""
    node, factor = _behind_factors(loss)
    if node is None or node.name() not in ("NllLossBackward0", "NllLoss2DBackward0"):
        return None
    if node._saved_reduction != _MEAN or node._saved_weight is not None:
        return None
    shape = node.next_functions[0][0]._input_metadata[0].shape
    classes = int(shape[1] if len(shape) > 1 else shape[0])
    with torch.no_grad():
        targets = node._saved_target.detach().reshape(-1)
        ignored = (targets < 0) | (targets >= classes) | (targets == node._saved_ignore_index)
        counted = torch.where(ignored, classes, targets)
        counts = torch.zeros(classes + 1, device=targets.device)
        counts.scatter_add_(0, counted, torch.ones_like(counted, dtype=counts.dtype))
    return TargetCounts(counts[:-1], factor)


class TargetFrequencies:
    """The targets of the first losses together: what frequency alone would give as a loss."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._factor: float | Tensor = 1.0

    def add(self, seen: TargetCounts | None) -> None:
        """The targets of one loss."""
        if seen is None:
            return
        counts = seen.counts
        if self._counts is not None and self._counts.shape == counts.shape:
            counts = counts + self._counts
        self._counts = counts
        self._factor = seen.factor

    def entropy(self) -> Tensor | None:
        """The loss that the frequencies give, times the loss's factor; NaN where few are known.

        With the correction of Miller and Madow, for a sample shows too little of what is rare.
        Nothing waits for the device.
        """
        if self._counts is None:
            return None
        counts = self._counts
        total = counts.sum()
        kinds = (counts > 0).sum()
        entropy = torch.special.entr(counts / total).sum() + (kinds - 1) / (2 * total)
        return torch.where(total < 2, math.nan, entropy) * self._factor


def _factor(other: Any) -> Any:
    """A number of the graph: read where that costs nothing."""
    if isinstance(other, Tensor) and is_accelerator(other.device):
        return other.detach().reshape(())
    return float(other)


def _chance(node: Any, name: str) -> float | None:
    """Of the loss itself.

    A sum counts all rows: where labels are ignored that is a little too much, and on the safe side.
    """
    if name not in (
        "BinaryCrossEntropyWithLogitsBackward0",
        "NllLossBackward0",
        "NllLoss2DBackward0",
    ):
        return None
    if node._saved_reduction not in (_MEAN, _SUM):
        return None
    shape = node.next_functions[0][0]._input_metadata[0].shape
    entries = math.prod(shape)
    classes = 1 if name.startswith("Binary") else int(shape[1] if len(shape) > 1 else shape[0])
    chance = math.log(max(classes, 2)) if classes > 1 or name.startswith("Binary") else None
    return (
        chance if chance is None or node._saved_reduction == _MEAN else chance * entries / classes
    )
