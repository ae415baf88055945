"""GS204: vanishing or exploding with depth."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import KEEP_THE_SIZE, NO_SATURATION
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS204",
    "gradient changes with depth",
    "warning",
    asked=Asked(when="stretch"),
    advice=Advice(
        recommendation=(
            "The signal is lost (or blown up) from layer to layer: use ReLU or GELU instead "
            "of sigmoid and tanh, add skip connections or normalisation, initialise for the "
            "activation."
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
    found = window.block_norms().tolist()
    if max(found) < ratio * min(found):
        return
    norms = zip(window.blocks, found, strict=True)
    known = [(name, norm) for (name, _), norm in norms if norm > 0]
    if len(known) < blocks:
        return
    quarter = max(1, len(known) // 4)
    first, last = (
        float(np.median([norm for _, norm in part])) for part in (known[:quarter], known[-quarter:])
    )
    # 1000 is AUTOTRAINER's limit: below a thousandth of the last layer, the first one vanishes.
    if first * ratio < last:
        yield Fact(
            f"vanishing: {known[0][0]} {first:.3g}, {known[-1][0]} {last:.3g}", (known[0][0],)
        )
    elif last * ratio < first:
        yield Fact(
            f"exploding: {known[0][0]} {first:.3g}, {known[-1][0]} {last:.3g}", (known[0][0],)
        )
