"""GS208: starved experts."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.checks.gs207_dead_experts import and_more, experts_in_words, rows_of
from gradsight.health.expert_life import ExpertLife
from gradsight.health.fixes import BALANCED_ROUTING
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.experts import ExpertGroup
from gradsight.values.measured import Flags

_NEARLY_ALWAYS = 0.9
_LOOKS = 8


@check(
    "GS208",
    "starved experts",
    "warning",
    asked=Asked(when="stretch", gate=lambda window: bool(window.experts)),
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
    ratio: float = 0.002,
    presence: float = 0.1,
    steps: int = 200,
    patience: int = 3,
) -> Iterator[Fact]:
    """Experts of a mixture get next to no gradient, or seldom one, while their neighbours do.

    Why: they learn far slower than the rest, and the router, which learns from what they are worth,
    asks them ever less often. Loads that differ by a few times are ordinary, and so are the first
    steps, before a load-balancing loss has had its effect.
    """
    if window.total == 0 or not window.finite:
        return
    found: list[tuple[ExpertGroup, list[int], ExpertLife]] = []
    for group in window.subject.experts:
        life = window.experts.get(group.name)
        if life is None or life.looks < _LOOKS or life.steps[-1] - window.first_step < steps:
            continue
        starved = np.flatnonzero(_starved(life, ratio, presence))
        if len(starved):
            found.append((group, [int(expert) for expert in starved], life))
    if found:
        group, experts, life = max(found, key=lambda each: len(each[1]) / each[0].size)
        seen = float(life.presence()[experts].max())
        most = float(life.ratios()[experts].max())
        yield Fact(
            f"{group.name}: {experts_in_words(experts, group.size)} had a gradient at {seen:.0%} "
            f"of the steps since {life.steps[0]} at most, and at most {most:.2g} times the squared "
            f"norm that an even split would give{and_more(len(found))}",
            window.named([row for each, few, _ in found for row in rows_of(each, few)]),
            first_step=life.steps[0],
        )


def _starved(life: ExpertLife, ratio: float, presence: float) -> Flags:
    """By expert: whether it gets far less than an even split would give, and still something."""
    # Those that get nothing at all any more are GS207's.
    comes = life.presence()
    others_come = bool(np.median(comes) >= _NEARLY_ALWAYS)
    seldom = (comes <= presence) & others_come
    starved: Flags = ((life.ratios() < ratio) | seldom) & (comes > 0)
    return starved
