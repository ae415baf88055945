"""GS604: targets that are not moved ahead."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.first_step import CopiedTargets

_SELF = (
    "Each target equals the input at the same position, so the model learns to copy. Shift the "
    "targets by one, so that each position predicts the next token. Exception: causal language "
    "models of the transformers library shift labels themselves. Pass labels=input_ids to such a "
    "model, without a shift."
)
_DECODER = (
    "At every position, the decoder is given its own target as input, so it learns to copy. Give "
    "it the targets moved right by one, so that each position gets the previous target."
)


def _advice(copied: CopiedTargets) -> Advice:
    # What to take of a tensor, by the dimension that is time.
    first, last = ("[:-1]", "[1:]") if copied.time_first else ("[:, :-1]", "[:, 1:]")
    if copied.has_other_input:
        return Advice(
            _DECODER,
            f"""
# in the loop, before the forward pass: the decoder gets the previous target
# (targets must begin with a start token, or the first one is never trained)
decoder_inputs, targets = targets{first}, targets{last}
# outputs = model(inputs, decoder_inputs)
""",
        )
    return Advice(
        _SELF,
        f"""
# in the loop, before the forward pass: the target is the next token
inputs, targets = inputs{first}, inputs{last}
""",
    )


@check(
    "GS604",
    "targets are not shifted",
    "critical",
    asked=Asked(when="first", needs=("first step",)),
    advice=_advice(CopiedTargets(1.0, sees_itself=True, is_causal=True)),
)
def not_shifted(window: Window, *, share: float = 0.9) -> Iterator[Fact]:
    """The targets of a causal model are its inputs at the same place.

    Why: the loss falls to nothing because the answer is in the input: the model learns to copy.
    Autoencoders and models that predict masked tokens also see later inputs and are not reported.
    A model with a second input is not reported either, if that input holds the shifted targets
    and no output sees later positions of it.
    """
    first = window.now.signals.first
    copied = None if first is None else first.copied
    if copied is None or not copied.is_causal or not copied.sees_itself:
        return
    if copied.share <= share:
        return
    evidence = f"{copied.share:.0%} of the labels that count equal the input at their own position"
    if copied.has_other_input:
        evidence += ", although the model has another input too"
    yield Fact(evidence, advice=_advice(copied))
