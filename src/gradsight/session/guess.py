"""What a loss would be if the model knew nothing.

Read from the operation that made it, without touching any data.
"""

import math
from typing import Any

from torch import Tensor

_MEAN, _SUM = 1, 2
_DEPTH = 4
"""Multiplications and divisions after the loss itself that are followed.

By a GradScaler, for accumulation, by a weight.
"""


def loss_of_a_guess(loss: Tensor) -> float | None:
    """The cross-entropy of equal probabilities, times what it was multiplied by since.

    None for any other loss.

    >>> import torch
    >>> logits, labels = torch.zeros(8, 5, requires_grad=True), torch.arange(8) % 5
    >>> loss = torch.nn.functional.cross_entropy(logits, labels) / 4
    >>> round(loss_of_a_guess(loss), 4), round(math.log(5) / 4, 4)
    (0.4024, 0.4024)
    """
    # The graph knows the shape of the logits and every factor; no data is read, so nothing waits.
    node: Any = loss.grad_fn
    factor = 1.0
    for _ in range(_DEPTH):
        if node is None:
            return None
        name = node.name()
        if name in ("MulBackward0", "DivBackward0"):
            other = node._saved_other
            if other is None or other.numel() != 1 or other.requires_grad:
                return None
            number = float(other)
            if number == 0:  # nothing counts, so that there is nothing to guess
                return None
            factor = factor * number if name == "MulBackward0" else factor / number
            node = node.next_functions[0][0]
            continue
        chance = _chance(node, name)
        return None if chance is None else chance * factor
    return None


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
