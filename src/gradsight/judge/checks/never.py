"""GS301: parameters that never get a gradient."""

from collections.abc import Iterator

import numpy as np

from gradsight.judge.registry import Fact, check
from gradsight.judge.window import Window


@check(
    "GS301",
    "never gets a gradient",
    "warning",
    when="stretch",
    needs=("norms", "optimizer"),
    recommendation=(
        "The optimizer has these parameters, but the loss never reaches them: look for detach(), no_grad(), .data,"
        " a branch that is not used, or take them out."
    ),
    fix="""
for name, parameter in model.named_parameters():
    if parameter.requires_grad and parameter.grad is None:
        print(f"Cut off from the loss: {name}")

# what is not meant to learn
model.branch.requires_grad_(False)
""",
)
def never(window: Window, *, steps: int = 10) -> Iterator[Fact]:
    """Parameters that the optimizer holds never get a gradient.

    Why: they stay as they were initialised, silently. Parameters that no optimizer holds may be left out on purpose.
    """
    if window.steps_seen < steps or window.subject.memberships is None or not window.alive.any() or window.alive.all():
        return
    held = np.array(window.subject.memberships) > 0
    rows = np.flatnonzero(held & np.array(window.subject.trainable) & ~window.alive)
    if len(rows):
        none = int((~window.received[rows]).sum())
        yield Fact(
            f"in {window.steps_seen} steps: {none} without any gradient, {len(rows) - none} with exactly zero",
            window.named(rows),
            first_step=window.first_step,
        )
