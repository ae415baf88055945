"""GS201: a spike."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import CLIP
from gradsight.health.registry import Fact, check
from gradsight.health.window import Window


@check(
    "GS201",
    "gradient spike",
    "warning",
    recommendation=(
        "Look at the batch of this step (corrupt sample, wrong label, outlier), and clip: one such step can undo many."
    ),
    fix=CLIP
    + """
# find the batches
if norm > 10 * usual_norm:
    torch.save(batch, f"suspicious-{step}.pt")
""",
)
def spike(
    window: Window,
    *,
    factor: float = 10.0,
    sigmas: float = 8.0,
    jump: float = 3.0,
    share: float = 1.0,
    least: float = 0.01,
) -> Iterator[Fact]:
    """The gradient jumped far above what is usual for this run.

    A jump is sudden: tenfold the usual, and several times the step before. What grows step by step
    is the business of others.

    Why: single batches push the weights far away: corrupt data, or a learning rate at the edge. A
    parameter of its own counts only where it alone exceeds what the whole gradient usually is: a
    layer that wakes up is no accident. Nor is a jump of what is next to nothing.
    """
    now = window.now
    if now.counts is not None or now.total <= least or now.step.skipped or window.steps_seen < 12:
        return
    bound, usual = (
        window.baseline.bound(factor, sigmas, len(window.logarithms)),
        window.baseline.median,
    )
    if bound is None or usual is None or not (high := window.logarithms > bound).any():
        return
    above = window.logarithms - usual
    current, before = (
        np.append(window.l2, now.total),
        np.append(window.previous, window.previous_total),
    )
    with np.errstate(invalid="ignore"):
        high &= ~(current < jump * before)
    matters = current > share * np.exp(usual[-1])
    rows = np.flatnonzero((high & matters)[:-1])
    if len(rows) or (high & matters)[-1]:
        worst = float(np.exp(min(50.0, above[np.append(rows, len(above) - 1)].max())))
        yield Fact(
            f"step {now.step.step}: norm {now.total:.4g}, up to {worst:.3g} times the usual",
            window.named(rows),
        )
