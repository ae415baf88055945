"""GS109: a loss that is NaN or infinite while gradients are finite."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS109",
    "loss is not finite",
    "warning",
    asked=Asked(when="stretch", gate=lambda window: window.broken_losses > 0),
    advice=Advice(
        recommendation=(
            "A term of the loss is NaN or infinite, and the others still train the model: look "
            "for a logarithm or a root of a negative number or of 0, and for a division by 0."
        ),
        fix="""
# in a loss of your own: a logarithm that is finite at 0 and below
def safe_log(x, eps=1e-8):
    return torch.log(x.clamp_min(eps))
""",
    ),
)
def loss_not_finite(window: Window, *, losses: int = 3) -> Iterator[Fact]:
    """The loss is NaN or infinite for `losses` steps in a row, while the gradients are finite.

    Why: you can no longer see from the loss how training goes, and one of its terms is wrong.
    Gradients can stay finite: the logarithm of -1 is NaN, but its derivative there is -1.
    """
    # Where no label counts, that is the reason, and has a finding of its own: GS606.
    if window.broken_losses >= losses and not window.unlabelled:
        yield Fact(f"the loss was {window.loss} at {window.broken_losses} steps in a row")
