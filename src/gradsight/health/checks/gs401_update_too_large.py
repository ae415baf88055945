"""GS401: updates that are too large."""

import math
from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import LOWER_RATE, WARM_UP
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS401",
    "updates too large",
    "warning",
    asked=Asked(when="look", needs=("details",)),
    advice=Advice(
        recommendation=(
            "A step changes weights by a large part of their own size: lower the learning "
            "rate tenfold, or warm it up."
        ),
        fix=LOWER_RATE + WARM_UP,
    ),
)
def fast(
    window: Window,
    *,
    ratio: float = 0.5,
    critical: float = 10.0,
    share: float = 0.5,
    growth: float = 3.5,
    patience: int = 2,
) -> Iterator[Fact]:
    """Single steps change most weights by a large part of their size, or blow them up together.

    Why: what was learned, or initialised, is overwritten. Behind a warm-up and clipping no single
    step is long; then the weights grow to a multiple of their size within the first steps, until
    the ratio of update and weight is ordinary again. Judged are matrices that did not start from
    zero: biases and the second half of a low-rank adapter grow from nothing, and may. So may a
    model whose loss falls far.
    """
    yield from _long_steps(window, ratio, critical, share)
    yield from _blown_up(window, growth)


def _long_steps(window: Window, ratio: float, critical: float, share: float) -> Iterator[Fact]:
    if window.losses and window.losses[-1] < 0.9 * window.first_losses[0]:
        return  # long steps that get somewhere
    matrices = [row for row in window.subject.matrices if not window.started_at_zero[row]]
    ratios = window.details[-1]["update_ratio"][matrices] if matrices else np.zeros(0)
    known = ratios[~np.isnan(ratios)]
    if not len(known) or (known > ratio).mean() <= share:
        return
    rows = [row for row, value in zip(matrices, ratios.tolist(), strict=True) if value > ratio]
    # Ten times the weight, the default of `critical`, is SageMaker Debugger's limit too.
    middle = float(np.median(known))
    text = (
        f"step {window.step.step}: median update is {middle:.0%} of the weight, in {len(rows)} "
        f"of {len(known)} matrices{window.at_rate}"
    )
    yield Fact(text, window.named(rows), "critical" if middle > critical else None)


_EARLY = range(16, 200)
"""Steps within which such growth is no learning: over many thousand, weights may grow."""
_SOLVED = 0.5


def _blown_up(window: Window, growth: float) -> Iterator[Fact]:
    """Most matrices have become a multiple of what they were, or of what they should start at."""
    if window.steps_seen not in _EARLY or not window.losses:
        return
    # A problem that is being solved may need large weights: separable classes, for one.
    if np.median(list(window.losses)[-5:]) < _SOLVED * np.median(window.first_losses[:3]):
        return
    matrices = [row for row in window.subject.matrices if not window.started_at_zero[row]]
    # The weights of a few layers are the answer itself, of whatever size that is.
    if len(matrices) < 4 or window.at_rest:
        return
    usual = np.array([_usual_size(window.subject.shapes[row]) for row in matrices])
    start = np.maximum(window.start_rms[matrices], usual)
    grown = window.details[-1]["weight_rms"][matrices] / start
    known = ~np.isnan(grown)
    if not known.any() or np.median(grown[known]) <= growth:
        return
    middle = float(np.median(grown[known]))
    rows = [row for row, times in zip(matrices, grown.tolist(), strict=True) if times > growth]
    text = (
        f"step {window.step.step}: the weights of {len(rows)} of {len(matrices)} matrices have "
        f"grown, by a median of {middle:.1f} times in {window.steps_seen} steps{window.at_rate}"
    )
    yield Fact(text, window.named(rows), first_step=window.first_step)


def _usual_size(shape: tuple[int, ...]) -> float:
    """Half the root mean square that torch initialises a layer of this shape with.

    What starts far smaller has to grow to about that.
    """
    inputs = math.prod(shape[1:])
    return float(0.5 * (3 * max(1, inputs)) ** -0.5)
