"""GS109: a loss that is NaN or infinite while gradients are finite."""

from collections.abc import Iterator

from gradsight.health.fixes import SAFE_LOG
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.wording import short_place


@check(
    "GS109",
    "loss is not finite",
    "warning",
    asked=Asked(
        when="stretch",
        gate=lambda window: window.broken_losses > 0 or window.at_end is not None,
        at_failure=True,
    ),
    advice=Advice(
        recommendation=(
            "A term of the loss is NaN or infinite: look for a logarithm or a root of a negative "
            "number or of 0, for a division by 0, and for NaN in the data or the labels."
        ),
        fix=SAFE_LOG,
    ),
)
def loss_not_finite(window: Window, *, losses: int = 3) -> Iterator[Fact]:
    """The loss is NaN or infinite.

    Gradsight reports it if the gradients are finite at `losses` such steps in a row, or if the
    script fails because of such a loss.

    Why: you can no longer see from the loss how training goes, and one of its terms is wrong.
    Gradients can stay finite: the logarithm of -1 is NaN, but its derivative there is -1. Many
    scripts test the loss before backward and end at the first one that is not finite.
    """
    at_end = window.at_end
    if at_end is not None:
        what = "NaN" if at_end.state == "nan" else "infinite"
        place = short_place(at_end.place)
        text = f"`{at_end.name}` was {what} when the script ended at {place}, in step {at_end.step}"
        if at_end.inputs:
            text += f"; NaN also in {', '.join(at_end.inputs)}"
        yield Fact(text, severity="critical", first_step=at_end.step)
        return
    # Where no label counts, that is the reason, and has a finding of its own: GS606.
    if window.broken_losses >= losses and not window.unlabelled:
        yield Fact(f"the loss was {window.loss} at {window.broken_losses} steps in a row")
