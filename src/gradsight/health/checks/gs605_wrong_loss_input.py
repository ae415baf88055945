"""GS605: a loss that is fed the wrong thing."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window

_RECOMMENDATION = (
    "cross_entropy and binary_cross_entropy_with_logits take logits, and make probabilities "
    "themselves; nll_loss and kl_div take logarithms of probabilities. Take the softmax or sigmoid "
    "out of the model, or use the loss that fits the model's output."
)

_LOGARITHM = "output.clamp_min(1e-8).log()"


def _instead(loss: str, of_probabilities: str | None = None, otherwise: str | None = None) -> str:
    """Return the code that computes this loss.

    of_probabilities: the output as the loss takes it if the model ends in a softmax or sigmoid.
    otherwise: the same if it does not.
    """
    lines = [
        "# in the loop, instead of the forward pass: fit the output to the loss",
        "# (remove the softmax or sigmoid in front of your loss)",
        "output = model(inputs)",
    ]
    if of_probabilities is not None:
        lines += [
            "if output.min() >= 0 and output.max() <= 1:",
            "    # the model ends in a softmax or sigmoid: better remove that layer",
            f"    output = {of_probabilities}",
        ]
    if otherwise is not None:
        lines += ["else:", f"    output = {otherwise}"]
    return "\n".join([*lines, f"loss = {loss}", ""])


@check(
    "GS605",
    "the loss is fed the wrong thing",
    "warning",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=_RECOMMENDATION,
        fix=_instead("F.cross_entropy(output, targets)", _LOGARITHM),
    ),
)
def wrong_input(window: Window) -> Iterator[Fact]:
    """A loss function is given probabilities for logits, or either for logarithms.

    Why: nothing fails. A second softmax keeps the loss high and its gradient small; without
    log-probabilities the loss can fall below zero, so its value is misleading.
    log_softmax before cross_entropy changes nothing, and is left alone.
    """
    first = window.now.signals.first
    for fed in () if first is None else first.fed:
        where = f" at {fed.place}" if fed.place else ""
        text = f"{fed.function}{where} is given {fed.given}, and takes {fed.wanted}"
        yield Fact(text, advice=_ADVICE.get((fed.function, fed.given)))


_KL_DIV = 'F.kl_div(output, targets, reduction="batchmean")'
_ADVICE = {
    case: Advice(_RECOMMENDATION, fix)
    for case, fix in {
        ("nll_loss", "logits"): _instead("F.cross_entropy(output, targets)"),
        ("binary_cross_entropy_with_logits", "probabilities"): _instead(
            "F.binary_cross_entropy_with_logits(output, targets)", "output.logit(eps=1e-6)"
        ),
        ("kl_div", "logits"): _instead(_KL_DIV.replace("output", "output.log_softmax(-1)")),
        ("kl_div", "probabilities"): _instead(_KL_DIV, _LOGARITHM, "output.log_softmax(-1)"),
        ("kl_div", "log-probabilities as targets"): _instead(
            'F.kl_div(\n    output.log_softmax(-1), targets, reduction="batchmean",\n'
            "    log_target=True,\n)"
        ),
    }.items()
}
"""By function and what it was given. Probabilities for any other loss: the check's own advice."""
