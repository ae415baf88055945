"""GS501: the same gradient again."""

from collections.abc import Iterator

from gradsight.health.fixes import NEW_BATCHES
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS501",
    "the same gradient again",
    "warning",
    asked=Asked(gate=lambda window: window.repeats > 0),
    advice=Advice(
        recommendation=(
            "Neither the batch nor the weights change: check that the loader advances, that "
            "backward() runs on the new loss, and that the learning rate is not zero."
        ),
        fix=NEW_BATCHES,
    ),
)
def repeats(window: Window, *, steps: int = 4) -> Iterator[Fact]:
    """The gradient is exactly that of the step before.

    Why: two batches never give the same gradient bit for bit; something stands still. At a minimum
    that is as it should be.
    """
    if window.repeats >= steps and window.converging is not True and not window.at_rest:
        yield Fact(f"{window.repeats} steps in a row", first_step=window.step.step - window.repeats)
