"""GS108: a loss that starts too high."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import NEW_LAST_LAYER
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS108",
    "starts worse than guessing",
    "warning",
    asked=Asked(when="look", needs=("guess",)),
    advice=Advice(
        recommendation=(
            "A new model should begin near the loss of a guess: initialise the last layer (or "
            "all layers) smaller, normalise the inputs, and check that labels and classes "
            "match."
        ),
        fix=NEW_LAST_LAYER
        + """
# before the loop: the mean and the size of the inputs
example = next(iter(loader))[0].float()
mean = example.mean(dim=0)
deviation = example.std(dim=0, correction=0) + 1e-6

# in the loop, before the forward pass: inputs with mean 0, deviation 1
# (not if they are tokens)
if inputs.is_floating_point():
    inputs = (inputs - mean) / deviation
""",
    ),
)
def start(window: Window, *, first: float = 3.0, soon: float = 2.0) -> Iterator[Fact]:
    """The first losses are far above what equal probabilities would give.

    Why: the model is sure of wrong answers before it has learned anything, so the first steps only
    tear that down: weights or inputs are too large, or the labels are not what the model was
    trained for. Judged where the loss is a cross-entropy.
    """
    if len(window.starts) < 3 or window.details_taken > 5:
        return
    # The loss is asked, not a norm: behind layer normalisation the gradients do not show weights
    # that are far too large.
    ratios = [loss / guess for loss, guess in window.starts]
    if ratios[0] > first and np.median(ratios) > soon:
        text = (
            f"the first losses are {', '.join(f'{ratio:.3g}' for ratio in ratios)} times that "
            "of a guess"
        )
        yield Fact(text, first_step=window.first_step)
