"""GS201: a spike."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.bad_steps import (
    NO_PARAMETERS,
    EarlyLook,
    Jump,
    far_above,
    is_sudden,
    spiking,
)
from gradsight.health.baseline import logarithms
from gradsight.health.registry import Advice, AsIncident, Fact, check
from gradsight.health.window import Window


def _about_to_be_used(look: EarlyLook, **limits: float) -> bool:
    """The same for the total alone: it is all that is known on every rank before the update."""
    total = look.norms.total
    # Nearly every step ends here: what did not jump is no spike, however large it is.
    if not is_sudden(total, look.history.previous, limits["jump"]):
        return False
    baseline = look.history.baseline
    high = far_above(logarithms(NO_PARAMETERS, total), baseline, limits)
    if high is None:
        return False
    jumped = Jump(
        l2=NO_PARAMETERS,
        total=total,
        previous_l2=NO_PARAMETERS,
        previous_total=look.history.previous,
        steps_seen=look.history.steps_seen + 1,
    )
    high = spiking(jumped, high, baseline, limits)
    return high is not None and bool(high[-1])


@check(
    "GS201",
    "gradient spike",
    "warning",
    incident=AsIncident(kept="always", alarm=_about_to_be_used),
    advice=Advice(
        recommendation=(
            "Look at the batch of this step (corrupt sample, wrong label, outlier), and clip: "
            "one such step can undo many."
        ),
        fix="""
# before the loop: the norms so far
norms = []

# in the loop, after loss.backward(): clip, and save unusual batches
# (those with ten times the usual norm)
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
norm = norm.item()
if norms and norm > 10 * sorted(norms)[len(norms) // 2]:
    torch.save((inputs, targets), f"suspicious-{len(norms)}.pt")
norms.append(norm)
""",
        if_clipped=Advice(
            recommendation=(
                "Clipping limited this update. Look at the batch of this step: a corrupt sample, "
                "a wrong label or an outlier wastes a step each time it comes up."
            ),
            fix="""
# before the loop: the norms so far
norms = []

# in the loop, after loss.backward(): save unusual batches
# (those with ten times the usual norm)
gradients = [p.grad for p in model.parameters() if p.grad is not None]
norm = torch.nn.utils.get_total_norm(gradients).item()
if norms and norm > 10 * sorted(norms)[len(norms) // 2]:
    torch.save((inputs, targets), f"suspicious-{len(norms)}.pt")
norms.append(norm)
""",
        ),
    ),
)
def spike(
    window: Window,
    *,
    factor: float = 10.0,
    sigmas: float = 8.0,
    jump: float = 3.0,
    total_factor: float = 3.0,
    least: float = 0.01,
) -> Iterator[Fact]:
    """The gradient jumped far above what is usual for this run.

    A jump is sudden: `factor` times the usual norm, and `jump` times that of the step before. Other
    checks find a norm that grows step by step. It is also `jump` times the highest norm of the last
    50 steps, because high norms are usual in some runs, as in reinforcement learning. A single
    parameter counts only if its norm is `total_factor` times the usual norm of the whole gradient,
    because a layer may start to learn late. Nothing counts before step 14, and no total norm
    below `least` ever does.

    Why: single batches push the weights far away: corrupt data, or a learning rate at the edge.
    """
    if not window.finite or window.step.skipped:
        return
    limits = {"factor": factor, "sigmas": sigmas, "jump": jump, "total_factor": total_factor}
    limits["least"] = least
    high = far_above(window.logarithms, window.baseline, limits)
    if high is None:
        return
    jumped = Jump(
        l2=window.l2,
        total=window.total,
        previous_l2=window.previous,
        previous_total=window.previous_total,
        steps_seen=window.steps_seen,
    )
    high = spiking(jumped, high, window.baseline, limits)
    if high is None or window.baseline.median is None or not high.any():
        return
    rows = np.flatnonzero(high[:-1])
    above = window.logarithms - window.baseline.median
    # Finite entries of 1e30 have an infinite norm, and the exponential would overflow.
    worst = float(np.exp(min(50.0, above[np.append(rows, len(above) - 1)].max())))
    yield Fact(
        f"step {window.step.step}: norm {window.total:.4g}, up to {worst:.3g} times the usual",
        window.named(rows),
    )
