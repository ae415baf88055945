"""GS305: zero_grad forgotten."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS305",
    "gradients are not cleared",
    "critical",
    asked=Asked(needs=("clearing",), gate=lambda window: window.uncleared > 0),
    advice=Advice(
        recommendation="Every step uses the sum of all gradients so far: clear them once per step.",
        fix="""
# in the loop, after optimizer.step(): clear the gradients
optimizer.zero_grad()
""",
    ),
)
def uncleared(window: Window, *, steps: int = 4) -> Iterator[Fact]:
    """The optimizer steps on gradients that were not cleared since its last step.

    Why: old gradients never leave: the step follows batches of long ago. Accumulating several
    batches for one step is something else, and is not meant here.
    """
    if window.uncleared >= steps:
        text = (
            f"{window.uncleared} steps in a row used gradients that still hold those of the "
            "step before"
        )
        others = window.is_one_of_several or window.subject.several is not None
        yield Fact(
            text,
            first_step=window.step.step - window.uncleared + 1,
            advice=Advice(_BESIDE_OTHERS, _BEFORE_BACKWARD) if others else None,
        )


_BESIDE_OTHERS = (
    "Every step uses the sum of all gradients so far. The backward pass of another network's loss "
    "also adds to the gradients of this network. Clear them just before the backward pass of this "
    "network's own loss."
)
_BEFORE_BACKWARD = """
# in the loop, before loss.backward(): clear the gradients
# (use the optimizer that steps next; with gradient accumulation, clear
# only before the first micro-batch of a step)
optimizer.zero_grad()
"""
