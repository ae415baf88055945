"""GS101: a large gradient."""

from collections.abc import Iterator

from gradsight.health.fixes import CLIP, LOWER_LIMIT
from gradsight.health.large_norms import is_only_a_unit
from gradsight.health.registry import Advice, Fact, check
from gradsight.health.window import Window


@check(
    "GS101",
    "large gradient",
    "warning",
    advice=Advice(
        recommendation=(
            "Clip the gradient to a norm of 1, and check that inputs and targets are "
            "normalised and the loss is a mean."
        ),
        fix=CLIP,
        if_clipped=Advice(
            recommendation=(
                "The gradient is large although it is clipped: lower the limit, and check that "
                "inputs and targets are normalised and the loss is a mean."
            ),
            fix=LOWER_LIMIT,
        ),
    ),
)
def large(
    window: Window, *, limit: float = 100.0, critical: float = 1000.0, patience: int = 3
) -> Iterator[Fact]:
    """The gradient that the optimizer uses is large: it may be about to explode.

    Why: a step is as long as the gradient times the learning rate; the outer guard for what no
    baseline has seen yet. A norm that was large from the start, with short steps and a loss that
    falls, is a unit: the loss is a sum.
    """
    # A rule of thumb: 0.1 to 10 is healthy, above 100 may explode, above 1000 does (GS102). Alone
    # it misfires on real recipes, so trends are judged by baselines.
    if limit < window.effective <= critical and not window.step.skipped:
        if is_only_a_unit(window):
            return
        yield Fact(f"norm {window.effective:.4g}, limit {limit:g}", window.largest())
