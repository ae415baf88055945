"""GS106: no gradient at all."""

from collections.abc import Iterator

from gradsight.health.fixes import LIVING_UNITS, START_ADAPTERS
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.adapters import is_of_an_adapter
from gradsight.values.steps import NO_GRADIENT


@check(
    "GS106",
    "zero gradient",
    "critical",
    # Not even norms: where no parameter has a gradient there are none to be seen.
    asked=Asked(needs=()),
    advice=Advice(
        recommendation=(
            "Nothing is learned: check that backward() runs on the loss of this model, that "
            "its parameters are not all frozen, and that no detach(), no_grad() or dead ReLU "
            "cuts it off."
        ),
        fix="""
# in the loop, after loss.backward(): list parameters without a gradient
for name, parameter in model.named_parameters():
    if not parameter.requires_grad:
        print(f"Frozen: {name}")
    elif parameter.grad is None:
        print(f"Cut off from the loss: {name}")
"""
        + LIVING_UNITS,
    ),
)
def zero(window: Window, *, patience: int = 3) -> Iterator[Fact]:
    """No gradient reaches any parameter: nothing is learned.

    Why: the optimizer's steps change nothing, or only decay the weights. A loss of exactly 0, a
    margin that is kept, has nothing left to learn.
    """
    # Where no label counts that is the cause, and has a finding of its own: GS606.
    if window.loss == 0 or window.unlabelled:
        return
    norms = window.norms
    if norms is None:
        if window.step.gradient == NO_GRADIENT:
            yield Fact("no parameter has a gradient")
        return
    if window.total == 0 and window.finite and not window.step.skipped:
        if len(norms.l2):
            text = f"the norm over {len(norms.l2)} parameters is exactly 0"
            yield Fact(text, advice=_ADAPTERS if _has_only_zero_adapters(window) else None)
        else:
            yield Fact("no parameter has a gradient")


def _has_only_zero_adapters(window: Window) -> bool:
    """Whether all matrices that are trained are factors of adapters, and zero."""
    learning = [row for row in window.subject.matrices if window.subject.trainable[row]]
    return bool(learning) and all(
        window.started_at_zero[row] and is_of_an_adapter(window.subject.names[row])
        for row in learning
    )


_ADAPTERS = Advice(
    recommendation=(
        "Both factors of each adapter (LoRA) are zero, so neither gets a gradient: initialise one "
        "of them randomly (lora_A) and leave the other at zero (lora_B)."
    ),
    fix=START_ADAPTERS,
)
