"""GS208: starved experts."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.checks.gs207_dead_experts import experts_in_words, rows_of
from gradsight.health.expert_life import ExpertLife
from gradsight.health.fixes import BALANCED_ROUTING
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.measured import Flags

_NEARLY_ALWAYS = 0.9


@check(
    "GS208",
    "starved experts",
    "warning",
    asked=Asked(
        when="look", needs=("details",), gate=lambda window: window.now.details.experts != {}
    ),
    advice=Advice(
        recommendation=(
            "The router gives these experts next to nothing to learn from: add or raise the "
            "load-balancing loss, or give each expert a capacity, so that the others pass tokens "
            "on to them."
        ),
        fix=BALANCED_ROUTING,
    ),
)
def starved_experts(
    window: Window,
    *,
    share: float = 0.002,
    presence: float = 0.15,
    looks: int = 8,
    steps: int = 200,
    chance: float = 1e-3,
    patience: int = 2,
) -> Iterator[Fact]:
    """Experts of a mixture get next to no gradient, or seldom one, while their neighbours do.

    Why: they learn far slower than the rest, and the router, which learns from what they are worth,
    asks them ever less often. Loads that differ by a few times are ordinary.
    """
    if window.total == 0 or not window.finite:
        return
    found = []
    for group in window.subject.experts:
        life = window.experts.get(group.name)
        if life is None or life.looks < looks or life.steps[-1] - life.steps[0] < steps:
            continue
        # Those that get nothing at all any more are GS207's.
        dead = life.dead(steps, chance)
        starved = np.flatnonzero(_starved(life, share, presence) & ~dead).tolist()
        if starved:
            least = float(life.shares()[starved].max())
            found.append((group, starved, least, float(life.presence()[starved].max())))
    if found:
        group, starved, least, seen = max(found, key=lambda each: len(each[1]) / each[0].size)
        more = f"; and in {len(found) - 1} more like it" if len(found) > 1 else ""
        yield Fact(
            f"{group.name}: {experts_in_words(starved, group.size)} had a gradient at {seen:.0%} "
            f"of the looks at most, and {least:.2g} times an even share of its square{more}",
            window.named([row for each, few, *_ in found for row in rows_of(each, few)]),
            first_step=window.experts[group.name].steps[0],
        )


def _starved(life: ExpertLife, share: float, presence: float) -> Flags:
    """By expert: whether it gets far less than an even share, and still something."""
    comes = life.presence()
    seldom = (comes <= presence) & bool(np.median(comes) >= _NEARLY_ALWAYS)
    return ((life.shares() < share) | seldom) & (comes > 0)
