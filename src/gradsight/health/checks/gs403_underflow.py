"""GS403: underflow in half precision."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import BFLOAT16
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS403",
    "underflow in float16",
    "warning",
    asked=Asked(when="look", needs=("details",)),
    advice=Advice(
        recommendation=(
            "Small gradients are rounded to zero in float16: scale the loss with a "
            "GradScaler, or use bfloat16, which has the range of float32."
        ),
        fix=BFLOAT16,
    ),
)
def underflow(window: Window, *, share: float = 0.5, patience: int = 3) -> Iterator[Fact]:
    """Much of the gradient is lost below float16's range.

    Why: what is rounded to zero is not learned. Judged only where values really are float16:
    parameters, or the forward pass.
    """
    look, subject = window.details[-1], window.subject
    if not any(subject.half) and not window.now.signals.half:
        return
    # A GradScaler is the remedy: where one is at work, there is nothing left to advise.
    unscaled = window.step.scale is None
    matrices = np.array(
        [row for row in subject.matrices if subject.half[row] or window.now.signals.half],
        dtype=np.intp,
    )
    if not len(matrices) or not unscaled:
        return
    lost = look["zero_share"][matrices] + look["tiny_share"][matrices]
    rows = matrices[np.nan_to_num(lost) > share]
    if len(rows) > 0.5 * len(matrices):
        text = f"{float(np.nanmedian(lost)):.0%} of the entries are zero or below 2**-14"
        yield Fact(text, window.named(rows))
