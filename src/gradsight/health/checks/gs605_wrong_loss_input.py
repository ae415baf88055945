"""GS605: a loss that is fed the wrong thing."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS605",
    "the loss is fed the wrong thing",
    "warning",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "cross_entropy and binary_cross_entropy_with_logits take logits, and make "
            "probabilities themselves; nll_loss and kl_div take logarithms of probabilities. "
            "Take the softmax or sigmoid out of the model, or put log_softmax in."
        ),
        fix="""
logits = model(inputs)
F.cross_entropy(logits, targets)                          # logits, no softmax before it
F.nll_loss(F.log_softmax(logits, dim=-1), targets)        # or logarithms
""",
    ),
)
def wrong_input(window: Window) -> Iterator[Fact]:
    """A loss function is given probabilities for logits, or either for logarithms.

    Why: nothing fails. A second softmax keeps the loss high and its gradient small; without
    logarithms the loss falls below zero and has no minimum where the model is right.
    log_softmax before cross_entropy changes nothing, and is left alone.
    """
    first = window.now.signals.first
    for fed in () if first is None else first.fed:
        where = f" at {fed.place}" if fed.place else ""
        yield Fact(f"{fed.function}{where} is given {fed.given}, and takes {fed.wanted}")
