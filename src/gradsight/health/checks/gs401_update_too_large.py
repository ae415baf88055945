"""GS401: updates that are too large."""

from collections.abc import Iterator

import numpy as np

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
        fix="""
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=500)
""",
    ),
)
def fast(
    window: Window,
    *,
    ratio: float = 0.5,
    critical: float = 10.0,
    share: float = 0.5,
    patience: int = 2,
) -> Iterator[Fact]:
    """Single steps change most weights by a large part of their size.

    Why: what was learned, or initialised, is overwritten. Judged are matrices that did not start
    from zero: biases and the second half of a low-rank adapter grow from nothing, and may. So may a
    model whose loss falls.
    """
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
        f"of {len(known)} matrices"
    )
    yield Fact(text, window.named(rows), "critical" if middle > critical else None)
