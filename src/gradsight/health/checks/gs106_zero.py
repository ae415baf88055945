"""GS106: no gradient at all."""

from collections.abc import Iterator

from gradsight.health.fixes import LIVING_UNITS
from gradsight.health.registry import Fact, check
from gradsight.health.window import Window


@check(
    "GS106",
    "zero gradient",
    "critical",
    needs=(),
    recommendation=(
        "Nothing is learned: check that backward() runs on the loss of this model, that its parameters are not all"
        " frozen, and that no detach(), no_grad() or dead ReLU cuts it off."
    ),
    fix="""
for name, parameter in model.named_parameters():
    if not parameter.requires_grad:
        print(f"Frozen: {name}")
    elif parameter.grad is None:
        print(f"Cut off from the loss: {name}")
"""
    + LIVING_UNITS,
)
def zero(window: Window, *, patience: int = 3) -> Iterator[Fact]:
    """No gradient reaches any parameter: nothing is learned.

    Why: the optimizer's steps change nothing, or only decay the weights. A loss of exactly 0, a
    margin that is kept, has nothing left to learn.
    """
    now = window.now
    if now.loss == 0:
        return
    if now.l2 is not None and now.total == 0 and now.counts is None and not now.step.skipped:
        yield Fact(
            f"the norm over {len(now.l2)} parameters is exactly 0"
            if len(now.l2)
            else "no parameter has a gradient"
        )
    elif now.l2 is None and now.step.gradient == "none seen":
        yield Fact("no parameter has a gradient")
