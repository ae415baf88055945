"""GS105: a small gradient."""

from collections.abc import Iterator

from gradsight.health.fixes import KEEP_THE_SIZE, LIST_FROZEN
from gradsight.health.large_norms import steps_are_short
from gradsight.health.registry import Advice, Fact, check
from gradsight.health.window import Window


@check(
    "GS105",
    "small gradient",
    "warning",
    advice=Advice(
        recommendation=(
            "Check the architecture (saturating activations, missing skip connections or "
            "normalisation) and the initialisation; look for frozen parameters."
        ),
        fix=LIST_FROZEN + KEEP_THE_SIZE,
    ),
)
def small(window: Window, *, limit: float = 0.001, patience: int = 10) -> Iterator[Fact]:
    """The gradient is small from the start: it may be vanishing.

    Why: next to nothing reaches the weights. A gradient that becomes small later is the business of
    the trend checks. Adam divides the gradient by its own size: with such an optimizer the finding
    is made only if the weights hardly change.
    """
    # 0.001 is the lower end of the rule of thumb in GS101. A run that converges gets there too, so
    # only the first steps are asked.
    if (
        0 < window.total < limit
        and window.finite
        and window.steps_seen <= 2 * patience
        and not window.at_rest
        and not (window.subject.normalising and steps_are_short(window))
    ):
        yield Fact(f"norm {window.total:.3g}, limit {limit:g}")
