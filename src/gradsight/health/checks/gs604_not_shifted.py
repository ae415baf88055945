"""GS604: targets that are not moved ahead."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS604",
    "targets are not shifted",
    "critical",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "The targets are the inputs at the same place, and the model sees them: it learns "
            "to copy. Move the targets ahead by one; a model that moves its labels itself "
            "(those of transformers do) is given them as they are."
        ),
        fix="""
# in the loop, before the forward pass: the target is the next token
inputs, targets = inputs[:, :-1], inputs[:, 1:]
""",
    ),
)
def not_shifted(window: Window, *, share: float = 0.9) -> Iterator[Fact]:
    """The targets of a causal model are its inputs at the same place.

    Why: the loss falls to nothing because the answer is in the input; what was learned is to
    copy. An autoencoder, and a model that predicts masked tokens, sees later inputs too and is
    left alone.
    """
    first = window.now.signals.first
    copied = None if first is None else first.copied
    if copied is None or not copied.is_causal or not copied.sees_itself:
        return
    if copied.share > share:
        yield Fact(f"{copied.share:.0%} of the labels that count are the input at their own place")
