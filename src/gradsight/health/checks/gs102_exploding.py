"""GS102: an exploding gradient."""

from collections.abc import Iterator

from gradsight.health.bad_steps import EarlyLook, is_exploding
from gradsight.health.fixes import CLIP, LOWER_LIMIT, LOWER_RATE
from gradsight.health.large_norms import is_only_a_unit
from gradsight.health.registry import Advice, AsIncident, Fact, check
from gradsight.health.window import Window


def _about_to_be_used(look: EarlyLook, *, limit: float, patience: int) -> bool:
    # The norm before clipping is known already; what is left of it has to be read.
    return is_exploding(look.norms.total, limit) and is_exploding(look.used_norm, limit)


@check(
    "GS102",
    "exploding gradient",
    "critical",
    incident=AsIncident(alarm=_about_to_be_used),
    advice=Advice(
        recommendation=(
            "Clip the gradient at once and lower the learning rate; then look for missing "
            "normalisation or too large an initialisation."
        ),
        fix=CLIP + LOWER_RATE,
        if_clipped=Advice(
            recommendation=(
                "The limit of the clipping lies far too high: lower it and the learning rate; "
                "then look for missing normalisation or too large an initialisation."
            ),
            fix=LOWER_LIMIT + LOWER_RATE,
        ),
    ),
)
def exploding(window: Window, *, limit: float = 1000.0, patience: int = 3) -> Iterator[Fact]:
    """The gradient that the optimizer uses is exploding.

    Why: a few such steps carry the weights to where the loss overflows. What clipping has tamed
    does not count, nor does a norm that was large from the start, with short steps and a loss that
    falls: the loss is a sum.
    """
    # What a GradScaler leaves out moves no weight; what is not finite is GS103's and GS104's.
    reached_the_optimizer = window.finite and not window.step.skipped
    if reached_the_optimizer and is_exploding(window.effective, limit):
        if is_only_a_unit(window):
            return
        yield Fact(f"norm {window.effective:.4g}, limit {limit:g}", window.largest())
