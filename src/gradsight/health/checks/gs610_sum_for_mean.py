"""GS610: a sum where a mean is meant."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS610",
    "a sum where a mean is meant",
    "warning",
    asked=Asked(when="look", needs=("passes", "details")),
    advice=Advice(
        recommendation=(
            "The loss is a sum over the batch, and the learning rate is one for a mean: take the "
            "mean, or divide the learning rate by the size of the batch."
        ),
        fix="""
# in the loop, before loss.backward(): the mean instead of the sum
loss = loss / targets.numel()
""",
    ),
)
def summed(
    window: Window, *, ratio: float = 0.05, entries: int = 4, share: float = 0.5
) -> Iterator[Fact]:
    """The loss is a sum, and the steps are too long for one.

    Why: the step grows with the size of the batch. A sum alone is no fault (an optimizer that
    rescales, or a learning rate that was chosen for it, takes it as it is); the norm alone
    tells nothing. Both must hold: a loss that is a sum over `entries` or more with a factor of
    one, and steps that change most matrices by more than `ratio` of their size, though they
    would not if it were a mean.
    """
    passes = window.now.signals.passes
    if passes is None or passes.summed is None or passes.summed < entries:
        return
    matrices = [row for row in window.subject.matrices if not window.started_at_zero[row]]
    ratios = window.details[-1]["update_ratio"][matrices] if matrices else np.zeros(0)
    known = ratios[~np.isnan(ratios)]
    if not len(known) or (known > ratio).mean() <= share:
        return
    middle = float(np.median(known))
    yield Fact(
        f"step {window.step.step}: the loss is the sum of {passes.summed} entries, and the median "
        f"update is {middle:.0%} of the weight",
        window.named([row for row, r in zip(matrices, ratios.tolist(), strict=True) if r > ratio]),
    )
