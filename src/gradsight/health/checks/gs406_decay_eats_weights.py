"""GS406: weight decay that eats the weights."""

import math
from collections.abc import Iterator

from gradsight.health.fixes import WEAKER_DECAY
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS406",
    "decay eats the weights",
    "warning",
    asked=Asked(when="look", needs=("optimizer",)),
    advice=Advice(
        recommendation=(
            "Weight decay takes away more per step than training can put back: lower it (0.01 to "
            "0.1 is usual with AdamW, 1e-4 with SGD). What it takes is decay times learning rate."
        ),
        fix=WEAKER_DECAY,
    ),
)
def eaten(window: Window, *, limit: float = 0.01, critical: float = 0.2) -> Iterator[Fact]:
    """Weight decay takes away a large part of the weights within a few steps.

    Why: every step multiplies the weights by 1 - lr x decay, whatever the gradient says. Known from
    the optimizer's settings before anything is lost. Strong decay by intention is far below the
    limit: a learning rate of 1e-3 with a decay of 1 takes 0.1% per step.
    """
    subject = window.subject
    bad = [place for place, group in enumerate(subject.groups) if group.shrinks > limit]
    if not bad:
        return
    rows = [
        row for row, place in enumerate(subject.group_of) if place in bad and subject.trainable[row]
    ]
    if not rows:
        return
    worst = max(subject.groups[place].shrinks for place in bad)
    half = math.log(0.5) / math.log1p(-worst) if worst < 1 else 0.0
    text = f"lr x decay takes {worst:.2%} of the weights per step: half of them in {half:.3g} steps"
    yield Fact(text, window.named(rows), "critical" if worst > critical else None)
