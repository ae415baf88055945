"""GS613: padding that counts in the loss."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window

_RECOMMENDATION = (
    "Give padding the label -100, which the loss ignores: labels = input_ids.clone(), then "
    "labels[attention_mask == 0] = -100. transformers.DataCollatorForLanguageModeling(tokenizer, "
    "mlm=False) does the same for text, DataCollatorForTokenClassification for labels of tokens. "
    "If the end token is also the padding token, the first collator ignores real end tokens too: "
    "set another pad_token."
)
_DECODER = (
    "Give padding the label -100, which the loss ignores: labels[labels == tokenizer.pad_token_id] "
    "= -100. The model pads its decoder inputs itself. transformers.DataCollatorForSeq2Seq does so."
)


def _advice(recommendation: str, given: str, token: int, instead: str) -> Advice:
    """Return advice that leaves out a token; instead: what to use if it also ends texts."""
    return Advice(
        recommendation,
        f"""
# in the loop, before the forward pass: the loss ignores the label -100
# (if token {token} also ends texts,
# use {instead})
targets = targets.masked_fill({given} == {token}, -100)
""",
    )


def _of_mask(token: int) -> Advice:
    return _advice(_RECOMMENDATION, "inputs", token, "attention_mask == 0 instead")


def _of_shifted(token: int) -> Advice:
    # A mask from the inputs would miss the first padding label.
    both = f"(inputs == {token}) & (targets == {token}) instead"
    return _advice(_RECOMMENDATION, "targets", token, both)


@check(
    "GS613",
    "padding counts in the loss",
    "warning",
    asked=Asked(when="first", needs=("first step",)),
    advice=_of_shifted(0),
)
def padding_counts(window: Window, *, share: float = 0.05) -> Iterator[Fact]:
    """Padding has labels that count in the loss.

    Why: padding is easy to predict, so the loss looks better than it is. The gradient is diluted,
    and differs with the length of the longest sample. The first padding token after a text is not
    counted, since it may be the end token. Nothing is reported if a mask may be applied to the loss
    later, or if padding is less than `share` of the labels.
    """
    first = window.now.signals.first
    seen = None if first is None else first.padding
    if seen is None or not seen.counted or seen.counted < seen.places / 2:
        return
    part = seen.counted / seen.labels
    if part < share:
        return
    where = f" at {seen.place}" if seen.place else ""
    if seen.in_decoder:
        evidence = f"{seen.counted} of {seen.labels} labels that count{where} ({part:.0%})"
        advice = _advice(_DECODER, "targets", seen.token, "-100 only after the first of each text")
        yield Fact(
            f"{evidence} are padding at the end of a sequence (token {seen.token})", advice=advice
        )
        return
    evidence = (
        f"{seen.counted} of {seen.places} padding tokens have a label that counts{where}: "
        f"{part:.0%} of the {seen.labels} labels that count"
    )
    yield Fact(evidence, advice=(_of_shifted if seen.in_targets else _of_mask)(seen.token))
