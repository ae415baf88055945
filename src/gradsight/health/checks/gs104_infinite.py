"""GS104: an infinite gradient."""

from collections.abc import Iterator

from gradsight.health.bad_steps import EarlyLook, infinite_rows
from gradsight.health.checks.gs103_nan import broken_rows
from gradsight.health.fixes import BFLOAT16, SAFE_EXP
from gradsight.health.registry import Advice, AsIncident, Asked, Fact, check
from gradsight.health.window import Window


def _in_sight(look: EarlyLook) -> bool:
    return look.norms.counts is not None and bool(infinite_rows(look.norms).any())


@check(
    "GS104",
    "infinite gradient",
    "critical",
    asked=Asked(gate=lambda window: not window.finite),
    incident=AsIncident(alarm=_in_sight),
    advice=Advice(
        recommendation=(
            "Something overflowed: lower the learning rate, keep exponentials in range, and use "
            "bfloat16 instead of float16, or float16 with a GradScaler."
        ),
        fix=BFLOAT16 + SAFE_EXP,
    ),
)
def inf(window: Window) -> Iterator[Fact]:
    """A gradient is infinite.

    Why: clipping turns one infinity into zeros everywhere, or into NaN; either way the step is lost
    or the weights are.
    """
    if window.broken and window.norms is not None:
        yield from broken_rows(window, infinite_rows(window.norms), "Inf")
