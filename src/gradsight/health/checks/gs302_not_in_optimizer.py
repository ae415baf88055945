"""GS302: missing from the optimizer."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS302",
    "missing from the optimizer",
    "warning",
    asked=Asked(
        when="look",
        needs=("norms", "optimizer"),
        gate=lambda window: (
            window.subject.memberships is not None and 0 in window.subject.memberships
        ),
    ),
    advice=Advice(
        recommendation=(
            "These parameters get a gradient that nobody uses: give them to the optimizer, or "
            "freeze them, which also saves their part of backward."
        ),
        fix="""
# before the loop, and before a scheduler is made: add what is missing
groups = optimizer.param_groups
held = {id(each) for group in groups for each in group["params"]}
learning = [each for each in model.parameters() if each.requires_grad]
missing = [each for each in learning if id(each) not in held]
optimizer.add_param_group({"params": missing})
""",
    ),
)
def missing(window: Window, *, patience: int = 3) -> Iterator[Fact]:
    """Parameters get a gradient, but no optimizer holds them.

    Why: they are never updated. Often the optimizer was made before a layer was added or replaced.
    """
    counts = window.subject.memberships
    if counts is None or all(counts):
        return
    rows = np.flatnonzero((np.array(counts) == 0) & (window.l2 > 0))
    if len(rows):
        yield Fact(
            f"{len(rows)} of {len(counts)} parameters are in no optimizer", window.named(rows)
        )
