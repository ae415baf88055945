"""GS107: many zero gradients."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import LIVING_UNITS, NO_ZERO_WEIGHTS
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS107",
    "many zero gradients",
    "warning",
    asked=Asked(gate=lambda window: window.has_zeros),
    advice=Advice(
        recommendation=(
            "More than half of the parameters get a gradient of exactly zero: check the "
            "initialisation (all zero?), use LeakyReLU or GELU, look for branches that do not "
            "reach the loss."
        ),
        fix=LIVING_UNITS + NO_ZERO_WEIGHTS,
    ),
)
def many_zero(window: Window, *, share: float = 0.5, patience: int = 5) -> Iterator[Fact]:
    """Most parameters get a gradient of exactly zero.

    Why: they learn nothing; capacity is wasted, or a part of the model is cut off.
    """
    if window.norms is None or window.total == 0 or not window.finite:
        return
    # Half, by the rule of thumb in GS101; SageMaker Debugger has the same for dead ReLUs.
    size = len(window.norms.l2)
    zero = size - int(np.count_nonzero(window.norms.l2))
    if size >= 2 and zero > share * size:
        yield Fact(
            f"{zero} of {size} gradients are exactly 0",
            window.named(np.flatnonzero(window.l2 == 0)),
        )
