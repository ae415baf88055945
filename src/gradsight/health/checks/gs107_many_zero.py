"""GS107: many zero gradients."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import FOR_RELU, LIVING_UNITS
from gradsight.health.registry import Fact, check
from gradsight.health.window import Window


@check(
    "GS107",
    "many zero gradients",
    "warning",
    gate=lambda window: window.has_zeros,
    recommendation=(
        "More than half of the parameters get a gradient of exactly zero: check the initialisation (all zero?), "
        "use LeakyReLU or GELU, look for branches that do not reach the loss."
    ),
    fix=LIVING_UNITS + FOR_RELU,
)
def many_zero(window: Window, *, share: float = 0.5, patience: int = 5) -> Iterator[Fact]:
    """Most parameters get a gradient of exactly zero.

    Why: they learn nothing; capacity is wasted, or a part of the model is cut off.
    """
    now = window.now
    if (
        now.l2 is None
        or now.total == 0
        or len(now.l2) < 2
        or now.counts is not None
        or np.count_nonzero(now.l2) == len(now.l2)
    ):
        return
    zero = int((now.l2 == 0).sum())
    if zero > share * len(now.l2):
        yield Fact(
            f"{zero} of {len(now.l2)} gradients are exactly 0",
            window.named(np.flatnonzero(window.l2 == 0)),
        )
