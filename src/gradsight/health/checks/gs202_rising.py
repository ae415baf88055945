"""GS202: a steady rise."""

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np

from gradsight.health.fixes import CLIP, LOWER_RATE
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS202",
    "rising gradient",
    "warning",
    asked=Asked(when="stretch"),
    advice=Advice(
        recommendation=(
            "The gradient builds up to an explosion: clip before it comes, lower the learning "
            "rate, look for a loss that rises with it."
        ),
        fix=CLIP,
        if_clipped=Advice(
            recommendation=(
                "The gradient builds up behind the clipping, which hides it from the optimizer "
                "only: lower the learning rate, look for a loss that rises with it."
            ),
            fix=LOWER_RATE,
        ),
    ),
)
def rise(
    window: Window, *, factor: float = 10.0, least: float = 10.0, stretch: int = 40
) -> Iterator[Fact]:
    """The gradient rises steadily, and is beyond the healthy range.

    Why: an explosion announces itself; here there is still time. Growth within the ordinary range
    (0.1 to 10) is left alone.
    """
    # Twenty norms are looked at before the medians of all: early ends like this made judging a step
    # two to three times cheaper.
    if len(window.totals) < stretch or max(islice(reversed(window.totals), 20)) < least:
        return
    totals = np.array(window.totals)
    quarters = [float(np.median(part)) for part in np.array_split(totals[-4 * stretch :], 4)]
    steady = all(later > 1.3 * earlier for earlier, later in pairwise(quarters))
    if steady and quarters[3] > max(least, factor * quarters[0]) and window.converging is not True:
        text = " → ".join(f"{value:.3g}" for value in quarters)
        yield Fact(
            f"median norm by quarter of the last {len(totals[-4 * stretch :])} steps: {text}",
            window.largest(),
        )
