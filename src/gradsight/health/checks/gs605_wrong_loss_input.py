"""GS605: a loss that is fed the wrong thing."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window

_RECOMMENDATION = (
    "cross_entropy and binary_cross_entropy_with_logits take logits, and make probabilities "
    "themselves; nll_loss and kl_div take logarithms of probabilities. Take the softmax or sigmoid "
    "out of the model, or use the loss that fits the model's output."
)


def _instead(loss: str) -> str:
    """Return the code that computes this loss."""
    place = "# in the loop, instead of the forward pass: a loss for this output"
    return f"{place}\noutput = model(inputs)\nloss = {loss}\n"


@check(
    "GS605",
    "the loss is fed the wrong thing",
    "warning",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=_RECOMMENDATION,
        fix=_instead("F.cross_entropy(output.clamp_min(1e-8).log(), targets)"),
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
        text = f"{fed.function}{where} is given {fed.given}, and takes {fed.wanted}"
        yield Fact(text, advice=_ADVICE.get((fed.function, fed.given)))


_ADVICE = {
    case: Advice(_RECOMMENDATION, _instead(loss))
    for case, loss in {
        ("nll_loss", "logits"): "F.cross_entropy(output, targets)",
        ("binary_cross_entropy_with_logits", "probabilities"): (
            "F.binary_cross_entropy(output, targets)"
        ),
        ("kl_div", "logits"): ('F.kl_div(output.log_softmax(-1), targets, reduction="batchmean")'),
        ("kl_div", "probabilities"): (
            'F.kl_div(output.clamp(1e-8).log(), targets, reduction="batchmean")'
        ),
        ("kl_div", "log-probabilities as targets"): (
            'F.kl_div(output, targets, reduction="batchmean", log_target=True)'
        ),
    }.items()
}
"""By function and what it was given. Probabilities for any other loss: the check's own advice."""
