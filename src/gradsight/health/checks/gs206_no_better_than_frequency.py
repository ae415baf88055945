"""GS206: the loss stays where the first steps brought it."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import LOWER_RATE
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS206",
    "no better than frequency",
    "warning",
    asked=Asked(when="stretch", needs=("norms", "loss", "unigram", "details")),
    advice=Advice(
        recommendation=(
            "The first steps learned how frequent each target is, and nothing has come since: "
            "lower the learning rate tenfold; check that inputs and targets belong together and "
            "that the inputs reach the output."
        ),
        fix=LOWER_RATE
        + """
# before the loop: does the output depend on the input?
was_training = model.training
model.eval()
with torch.no_grad():
    print((model(inputs) - model(inputs.flip(0))).abs().max())
model.train(was_training)
""",
    ),
)
def stays(
    window: Window,
    *,
    near: float = 0.15,
    flat: float = 0.015,
    ratio: float = 3e-3,
    steps: int = 50,
    patience: int = 2,
) -> Iterator[Fact]:
    """The loss stays where guessing by frequency is, though the weights move.

    Why: whoever knows how often each target comes has this loss; a model that sees its inputs
    should soon be better. Steps that are far too long, or inputs that do not reach the output, keep
    it there. Judged where frequencies alone tell something, and where updates are not tiny: a slow
    run may stay there for a while.
    """
    level = window.unigram
    if level is None or level <= 0 or len(window.losses) < 2 * steps or window.step.skipped:
        return
    # A model of masked words stays there for long, and then leaves at once.
    if window.masked:
        return
    # Where the first loss is that of the frequencies already, nothing can be told from it.
    if np.median(window.first_losses[:3]) < 1.08 * level:
        return
    losses = np.array(window.losses)
    before, last = float(np.median(losses[-2 * steps : -steps])), float(np.median(losses[-steps:]))
    if not (1 - near / 3) * level < last < (1 + near) * level or before - last > flat * before:
        return
    ratios = window.details[-1]["update_ratio"][window.subject.matrices]
    known = ratios[~np.isnan(ratios)]
    if not len(known) or np.median(known) < ratio:
        return
    text = (
        f"the loss is {last:.3g} over the last {steps} steps and was {before:.3g} before; the "
        f"targets' frequencies alone give {level:.3g}"
    )
    yield Fact(text, first_step=window.step.step - steps + 1)
