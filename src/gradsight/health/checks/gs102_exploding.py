"""GS102: an exploding gradient."""

from collections.abc import Iterator

from gradsight.health.fixes import CLIP
from gradsight.health.registry import Fact, check
from gradsight.health.window import Window


@check(
    "GS102",
    "exploding gradient",
    "critical",
    recommendation=(
        "Clip the gradient at once and lower the learning rate; then look for missing normalisation or too large "
        "an initialisation."
    ),
    fix=CLIP
    + """
# and a tenth of the learning rate
for group in optimizer.param_groups:
    group["lr"] *= 0.1
""",
)
def exploding(window: Window, *, limit: float = 1000.0, patience: int = 3) -> Iterator[Fact]:
    """The gradient that the optimizer uses is exploding.

    Why: a few such steps carry the weights to where the loss overflows. What clipping has tamed
    does not count.
    """
    finite = window.now.counts is None
    if window.effective > limit and finite and not window.now.step.skipped:
        yield Fact(f"norm {window.effective:.4g}, limit {limit:g}", window.largest())
