"""GS302: missing from the optimizer."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.fixes import ADD_MISSING
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.adapters import is_of_an_adapter


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
        fix=ADD_MISSING,
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
    if not len(rows):
        return
    names = window.named(rows)
    text = f"{len(rows)} of {len(counts)} parameters are in no optimizer"
    if any(counts) and all(map(_is_added_by_peft, names)):
        text = f"the adapters were added after the optimizer was made: {text}"
        yield Fact(text, names, advice=_ADAPTERS)
    else:
        yield Fact(text, names)


def _is_added_by_peft(name: str) -> bool:
    return is_of_an_adapter(name) or ".modules_to_save." in name


_ADAPTERS = Advice(
    recommendation=(
        "The optimizer was made before the adapters, so it does not have them: make it after "
        "get_peft_model() or add_adapter(), or add their parameters to it."
    ),
    fix=ADD_MISSING,
)
