"""GS203: decay to nothing."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS203",
    "decaying gradient",
    "warning",
    asked=Asked(when="stretch", needs=("norms", "loss")),
    advice=Advice(
        recommendation=(
            "Training stalls although the loss is not solved: check the learning rate, "
            "saturating activations, and dead units."
        ),
        fix="""
# is the learning rate still alive?
print([group["lr"] for group in optimizer.param_groups])

# units that do not saturate or die
nn.GELU()             # instead of nn.Sigmoid(), nn.Tanh() or nn.ReLU()
""",
    ),
)
def decay(
    window: Window, *, factor: float = 1000.0, limit: float = 0.001, patience: int = 2
) -> Iterator[Fact]:
    """The gradient has decayed to nothing while the loss has not.

    Why: a solved problem and a stalled one both have no gradient; only the loss tells them apart.
    With one batch for ever, a gradient of nothing is a minimum; with a new one every time its noise
    would keep the gradient up, were it not cut off.
    """
    if window.now.signals.one_batch:
        return
    # None, not known, does not do: without a loss a solved problem looks like a stalled one.
    if (
        len(window.totals) < 20
        or min(islice(reversed(window.totals), 10)) >= limit
        or window.converging is not False
    ):
        return
    totals = np.array(window.totals)
    early, late = float(np.max(totals[: len(totals) // 2])), float(np.median(totals[-10:]))
    first, last = (
        float(np.median(window.first_losses[:5])),
        float(np.median(list(window.losses)[-10:])),
    )
    if late < limit and late * factor < early and last > 0.3 * first:
        yield Fact(
            f"norm {early:.3g} → {late:.3g}, while the loss went from {first:.3g} to {last:.3g}"
        )
