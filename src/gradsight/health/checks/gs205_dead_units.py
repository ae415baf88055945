"""GS205: dead units."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import FOR_RELU, LIVING_UNITS
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS205",
    "dead units",
    "warning",
    asked=Asked(when="look", needs=("details",)),
    advice=Advice(
        recommendation=(
            "Units that never get a gradient do not come back by themselves: use LeakyReLU or "
            "GELU, lower the learning rate, initialise biases at zero."
        ),
        fix=LIVING_UNITS + FOR_RELU,
    ),
)
def dead_units(window: Window, *, share: float = 0.7, looks: int = 4) -> Iterator[Fact]:
    """Most units of a layer get no gradient at any look.

    Why: a unit whose row of the weight has a zero gradient for every sample is dead, and its
    capacity lost. A few dead units are ordinary, and so are lookup tables whose rows are not in the
    batch.
    """
    # While a margin is kept the whole gradient is zero, and every unit looks dead.
    if window.details_taken < looks or window.total == 0:
        return
    dead = window.details[-1]["dead_share"]
    # 70% is AUTOTRAINER's limit; SageMaker Debugger's 50% was tried first.
    with np.errstate(invalid="ignore"):
        rows = np.flatnonzero(dead > share)
    if len(rows):
        shares = ", ".join(f"{window.subject.names[row]} {dead[row]:.0%}" for row in rows[:3])
        yield Fact(
            f"units without a gradient in the last {looks} looks: {shares}",
            window.named(rows),
            first_step=window.details[0].step,
        )
