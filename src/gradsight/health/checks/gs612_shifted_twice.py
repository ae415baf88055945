"""GS612: labels that are shifted twice."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window

_BY_HAND = Advice(
    recommendation=(
        "The labels are moved ahead twice, for example by the data set and again before the loss. "
        "Move them once, so that the target of every position is the next input."
    ),
    fix="""
# in the loop, instead of the forward pass: the target is the next token
output = model(inputs[:, :-1])
loss = F.cross_entropy(output.flatten(0, 1), inputs[:, 1:].flatten())
""",
)


@check(
    "GS612",
    "labels are shifted twice",
    "critical",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "The model shifts labels itself, as all causal models of transformers do: pass "
            "labels = input_ids, with -100 where no label should count. Do not shift them in the "
            "data set or the collator. transformers.DataCollatorForLanguageModeling(tokenizer, "
            "mlm=False) makes such labels."
        ),
        fix="""
# in the loop, before the forward pass: the model shifts the labels itself
targets = inputs.clone()    # with -100 where no label should count
""",
    ),
)
def shifted_twice(window: Window) -> Iterator[Fact]:
    """The target of every position is the input two places ahead: labels are shifted twice.

    Why: the model learns to skip a token. The loss falls as in a good run, but the text that it
    generates is wrong. Two cases are not reported: sequences that repeat themselves, because every
    shift fits them, and models that also have a next-token loss. The finding is critical if the
    labels are one position ahead already and the model shifts them again.
    """
    first = window.now.signals.first
    seen = None if first is None else first.shifted_twice
    if seen is None:
        return
    where = f" at {seen.place}" if seen.place else ""
    evidence = f"{seen.share:.0%} of the targets{where} are the input two places ahead"
    if seen.by_model:
        yield Fact(
            f"{evidence}: the labels were one place ahead already, and the model shifts them"
        )
    else:
        yield Fact(evidence, severity="warning", advice=_BY_HAND)
