"""The learning rate of every step: a line up, then half a cosine down."""

import math


def learning_rate(step: int, *, highest: float, warmup: int, total: int, lowest: float) -> float:
    """Rises over `warmup` steps to `highest`, then falls along a cosine to `lowest` at the last of
    `total` steps.

    >>> [round(learning_rate(step, highest=1.0, warmup=2, total=5, lowest=0.0), 2) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    return lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
