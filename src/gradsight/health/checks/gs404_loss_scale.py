"""GS404: a collapsing loss scale."""

from collections.abc import Iterator

from gradsight.health.fixes import BFLOAT16
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS404",
    "loss scale collapses",
    "critical",
    asked=Asked(needs=("scale",)),
    advice=Advice(
        recommendation=(
            "Every step overflows, so the GradScaler halves its scale and leaves the step "
            "out: find what is infinite (see the layers), use bfloat16, or lower the learning "
            "rate."
        ),
        fix=BFLOAT16
        + """
# in the loop, instead of the lines that use the scaler: bfloat16
loss.backward()
optimizer.step()
""",
    ),
)
def scale(
    window: Window, *, least: float = 1.0, share: float = 0.5, steps: int = 20
) -> Iterator[Fact]:
    """Mixed precision leaves out step after step, and its loss scale collapses.

    Why: a few steps left out are how the scale is found; when they do not stop, nothing is trained.
    """
    recent = list(window.scales)[-steps:]
    left_out = sum(skipped for _, skipped in recent)
    # GradScaler starts at 2**16 and halves. Below 1 it no longer lifts small gradients out of
    # underflow, it pushes them in.
    if (len(recent) == steps and left_out > share * steps) or (left_out and recent[-1][0] < least):
        yield Fact(
            f"{left_out} of the last {len(recent)} steps were left out; the scale is "
            f"{recent[-1][0]:g}"
        )
