"""GS207: dead experts."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import BALANCED_ROUTING
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.experts import ExpertGroup


@check(
    "GS207",
    "dead experts",
    "warning",
    asked=Asked(
        when="look", needs=("details",), gate=lambda window: window.now.details.experts != {}
    ),
    advice=Advice(
        recommendation=(
            "The router sends no token to these experts, and without tokens they do not come "
            "back by themselves: add or raise the load-balancing loss, add noise to the router's "
            "logits, or start its weights smaller; look whether their outputs reach the loss."
        ),
        fix=BALANCED_ROUTING,
    ),
)
def dead_experts(window: Window, *, steps: int = 30, chance: float = 1e-3) -> Iterator[Fact]:
    """Experts of a mixture get no gradient any more, while their neighbours do.

    Why: their parameters take memory and learn nothing, and the model is as small as what is left
    of it. An expert that is chosen seldom may have to wait for its turn: so its absence has to be
    longer than chance allows, by how often the others come.
    """
    if window.total == 0 or not window.finite:
        return
    found = []
    for group in window.subject.experts:
        life = window.experts.get(group.name)
        if life is None or group.name not in window.details[-1].experts:
            continue
        dead = np.flatnonzero(life.dead(steps, chance))
        if len(dead):
            since = life.steps[-max(life.absences()[each] for each in dead)]
            found.append((group, dead.tolist(), since))
    if found:
        group, dead, since = max(found, key=lambda each: len(each[1]) / each[0].size)
        more = f"; and in {len(found) - 1} more like it" if len(found) > 1 else ""
        yield Fact(
            f"{group.name}: {experts_in_words(dead, group.size)} had no gradient at any look "
            f"since step {since}{more}",
            window.named([row for each, gone, _ in found for row in rows_of(each, gone)]),
            first_step=min(step for _, _, step in found),
        )


def experts_in_words(experts: list[int], size: int) -> str:
    """Some experts of so many.

    >>> experts_in_words([1, 5], 8)
    '2 of 8 experts (1, 5)'
    """
    shown = ", ".join(str(each) for each in experts[:8])
    if len(experts) > 8:
        shown += ", ..."
    return f"{len(experts)} of {size} experts ({shown})"


def rows_of(group: ExpertGroup, experts: list[int]) -> list[int]:
    """The parameters of these experts: the tensor that holds them, or their own."""
    if group.row is not None:
        return [group.row]
    return [row for expert in experts for row in group.members[expert]]
