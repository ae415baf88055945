"""GS609: accumulation without its factor."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.steps import EDITED_GRADIENT


def _advice(times: int) -> Advice:
    """Return what to do about this many micro-batches per step."""
    return Advice(
        recommendation=(
            "Each backward pass adds the gradient of a mean, so the gradient is too large by a "
            "factor equal to the number of micro-batches. Divide the loss by that number."
        ),
        fix=f"""
# in the loop, before loss.backward(): the mean over micro-batches
micro_batches = {times}    # as many as you accumulate
loss = loss / micro_batches
""",
    )


@check(
    "GS609",
    "accumulation without its factor",
    "warning",
    asked=Asked(when="passes", needs=("passes",)),
    advice=_advice(4),
)
def not_divided(window: Window, *, tolerance: float = 0.02) -> Iterator[Fact]:
    """Several micro-batches make one step, and their losses are added up undivided.

    Why: with plain SGD the learning rate is that many times too high, and clipping and the
    reported loss mean something else. Two terms with a backward each, and gradients that are
    divided later, are left alone.
    """
    passes = window.now.signals.passes
    repeated = None if passes is None else passes.repeated
    if repeated is None or abs(repeated.factor - 1) > tolerance:
        return
    if window.step.gradient == EDITED_GRADIENT:
        return  # maybe divided after the last pass
    where = f" at {repeated.place}" if repeated.place else ""
    yield Fact(
        f"backward{where} ran {repeated.times} times for one step, each time on a mean that was "
        f"not divided by {repeated.times}",
        advice=_advice(repeated.times),
    )
