"""GS601: a position that sees later ones."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS601",
    "a position sees later ones",
    "critical",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "The output at a position depends on inputs that come after it, and its target is "
            "one of them: the loss falls, and nothing that generates is learned. Mask the "
            "attention, pad convolutions on the left only, and normalise over features, not "
            "over time."
        ),
        fix="""
# in the model: let a position attend to itself and to earlier ones
def attend(query, key, value):    # [rows, heads, time, width]
    attention = F.scaled_dot_product_attention
    return attention(query, key, value, is_causal=True)
""",
    ),
)
def sees_later(window: Window, *, ratio: float = 1e-3) -> Iterator[Fact]:
    """A position sees later ones, though its target is one of them.

    Why: the answer is in the input, so the loss is too good, often by a few percent only, and
    what was learned is of no use without it. Judged where targets are the inputs moved ahead. A
    position sees a later one if its output has a gradient there that is more than `ratio` times
    the largest gradient at the inputs before it.
    """
    first = window.now.signals.first
    leak = None if first is None else first.positions
    if leak is not None and leak.ratio > ratio:
        yield Fact(f"{leak.example} ({leak.looks} places were looked at)")
