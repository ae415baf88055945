"""GS402: updates that are too small."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import HIGHER_RATE
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS402",
    "updates too small",
    "warning",
    asked=Asked(when="look", needs=("details",)),
    advice=Advice(
        recommendation=(
            "Steps change the weights by less than rounding does: raise the learning rate, or "
            "look for a gradient that is divided away."
        ),
        fix=HIGHER_RATE,
    ),
)
def slow(window: Window, *, ratio: float = 1e-7, patience: int = 4) -> Iterator[Fact]:
    """Steps hardly change any weight.

    Why: training runs and nothing is learned. A step of a warm-up or at the end of a decay may be
    small; several looks in a row, no.
    """
    ratios = window.details[-1]["update_ratio"][window.subject.matrices]
    known = ratios[~np.isnan(ratios)]
    # A float32 has some seven digits: a relative update below 1e-7 is lost in rounding. SageMaker
    # Debugger draws the line at 1e-8.
    if len(known) and window.step.lr != 0 and not window.step.skipped and 0 < known.max() < ratio:
        yield Fact(f"the largest update of a matrix is {known.max():.1e} of its size")
