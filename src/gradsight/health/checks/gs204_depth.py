"""GS204: vanishing or exploding with depth."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import KEEP_THE_SIZE, LOWER_RATE, NO_SATURATION, WARM_UP
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.measured import Floats


@check(
    "GS204",
    "gradient changes with depth",
    "warning",
    asked=Asked(when="stretch"),
    advice=Advice(
        recommendation=(
            "The signal shrinks or grows from layer to layer. Use ReLU or GELU instead of sigmoid "
            "and tanh. Add skip connections or normalisation. Use the initialisation that fits "
            "your activation function."
        ),
        fix=NO_SATURATION + KEEP_THE_SIZE,
    ),
)
def depth(
    window: Window, *, ratio: float = 1000.0, blocks: int = 4, patience: int = 2
) -> Iterator[Fact]:
    """The gradients of the first and the last layers differ by orders of magnitude.

    Why: with one learning rate, one end of the model stands still or the other end is torn apart.
    Compared are the medians of the first and the last quarter of the blocks, over their matrices:
    biases and lookup tables have sizes of their own.
    """
    if not window.finite or len(window.blocks) < blocks:
        return
    now = window.block_norms()
    if now.max() < ratio * now.min():
        return
    ends = _ends(now, blocks)
    if ends is None:
        return
    first, last = ends
    names = [name for (name, _), norm in zip(window.blocks, now, strict=True) if norm > 0]
    # 1000 is AUTOTRAINER's limit: below a thousandth of the last layer, the first one vanishes.
    if first * ratio < last:
        how = "vanishing"
    elif last * ratio < first:
        how = "exploding"
    else:
        return
    known = now[now > 0]
    text = f"{how}: {names[0]} {known[0]:.3g}, {names[-1]} {known[-1]:.3g}"
    at_first = window.first_block_norms
    began = None if at_first is None else _ends(at_first, blocks)
    if began is not None and max(began) < ratio**0.5 * min(began):
        before = max(began) / min(began)
        text += f". At the first step, these norms differed only by a factor of {before:.2g}"
        yield Fact(text, (names[0],), advice=_WHILE_TRAINING)
    else:
        yield Fact(text, (names[0],))


def _ends(norms: Floats, blocks: int) -> tuple[float, float] | None:
    """Return the medians of the first and the last quarter; None if too few blocks have a norm."""
    known = norms[norms > 0]
    if len(known) < blocks:
        return None
    quarter = max(1, len(known) // 4)
    return float(np.median(known[:quarter])), float(np.median(known[-quarter:]))


_WHILE_TRAINING = Advice(
    recommendation=(
        "At the first step, the gradient norms of the layers were much closer to each other, so "
        "the gap grew during training. The learning rate is probably too large, especially for a "
        "transformer without warm-up. Lower the learning rate, or add a warm-up. If that does not "
        "help, add skip connections, or a normalisation before each layer."
    ),
    fix=LOWER_RATE + WARM_UP,
)
