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
    asked=Asked(when="stretch", gate=lambda window: bool(window.experts)),
    advice=Advice(
        recommendation=(
            "The router sends no token to these experts, and without tokens they do not come "
            "back by themselves: add or raise the load-balancing loss, add noise to the router's "
            "logits, or start its weights smaller; look whether their outputs reach the loss."
        ),
        fix=BALANCED_ROUTING,
    ),
)
def dead_experts(window: Window, *, steps: int = 50, chance: float = 0.01) -> Iterator[Fact]:
    """Experts of a mixture get no gradient any more, while their neighbours do.

    Why: their parameters take memory and learn nothing, and the model is as small as what is left
    of it. An expert that is chosen seldom may have to wait for its turn: so its absence has to be
    longer than chance allows, by how often the others come.
    """
    if window.total == 0 or not window.finite:
        return
    found: list[tuple[ExpertGroup, list[int], int]] = []
    for group in window.subject.experts:
        life = window.experts.get(group.name)
        if life is None:
            continue
        dead = [int(expert) for expert in np.flatnonzero(life.dead(steps, chance))]
        if dead:
            absences = life.absences()
            found.append((group, dead, life.steps[-max(absences[expert] for expert in dead)]))
    if found:
        group, dead, since = max(found, key=lambda each: len(each[1]) / each[0].size)
        yield Fact(
            f"{group.name}: {experts_in_words(dead, group.size)} had no gradient since step "
            f"{since}{and_more(len(found))}",
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


def and_more(groups: int) -> str:
    """What is said of the groups that are not named.

    >>> and_more(1), and_more(3)
    ('', '; 2 more groups are like it')
    """
    if groups == 1:
        return ""
    return f"; {groups - 1} more {'group is' if groups == 2 else 'groups are'} like it"


def rows_of(group: ExpertGroup, experts: list[int]) -> list[int]:
    """The parameters of these experts: the tensor that holds them, or their own."""
    if group.row is not None:
        return [group.row]
    return [row for expert in experts for row in group.members[expert]]
