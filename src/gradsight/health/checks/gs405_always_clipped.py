"""GS405: clipped at nearly every step."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS405",
    "clipped at every step",
    "warning",
    asked=Asked(when="stretch", needs=("norms", "clipping")),
    advice=Advice(
        recommendation=(
            "The limit lies far below the usual norm, so it sets the length of every step: "
            "raise max_norm to the usual norm, and lower the learning rate if that is "
            "unstable."
        ),
        fix="""
# before the loop: the norms so far
norms = []

# in the loop, instead of the line that clips: clip to the usual norm
gradients = [p.grad for p in model.parameters() if p.grad is not None]
norms.append(torch.nn.utils.get_total_norm(gradients).item())
usual = sorted(norms)[len(norms) // 2]
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=usual)
""",
    ),
)
def clipped(
    window: Window, *, share: float = 0.95, coefficient: float = 0.02, steps: int = 100
) -> Iterator[Fact]:
    """Clipping cuts nearly every step down to a small part.

    Why: then it is no guard but a second, hidden learning rate. Clipping every step is an ordinary
    recipe, and left alone unless next to nothing is left.
    """
    if len(window.clips) < steps or min(islice(reversed(window.clips), 10)) >= 1:
        return
    recent = np.array(window.clips)[-steps:]
    if (recent < 1).mean() < share or np.median(recent) >= coefficient:
        return
    usual = float(np.median(np.array(window.totals)[-steps:])) if window.totals else 0.0
    cut = float(np.median(recent))
    # PPO's published recipe cuts to 5%.
    yield Fact(
        f"{(recent < 1).mean():.0%} of {steps} steps, to {cut:.2%} of a usual norm of {usual:.3g}",
        first_step=window.step.step - steps + 1,
    )
