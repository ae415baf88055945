"""GS304: parameters that do not change."""

from collections.abc import Iterator, Sequence

import numpy as np

from gradsight.health.fixes import BFLOAT16
from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.measured import Details, Flags


@check(
    "GS304",
    "does not change",
    "warning",
    asked=Asked(when="look", needs=("details", "optimizer")),
    advice=Advice(
        recommendation=(
            "They have a gradient and an optimizer, but their values stay the same: check the "
            "learning rate of their group, a copy that the optimizer holds instead, code that "
            "puts old weights back, or bf16 weights that round updates away."
        ),
        fix="""
# before the loop: does every group have a learning rate?
for number, group in enumerate(optimizer.param_groups):
    size = sum(each.numel() for each in group["params"])
    print(number, group["lr"], size)
"""
        + BFLOAT16,
    ),
)
def unchanged(window: Window, *, looks: int = 3, steps: int = 12) -> Iterator[Fact]:
    """Parameters do not change although they get a gradient, or do not keep what they learned.

    Why: frozen by mistake: a learning rate of zero, updates lost in rounding, or weights that
    something puts back or draws anew after every step look like training and are none. Parameters
    that were frozen openly (requires_grad=False) are left alone, also where an optimizer holds
    them: so are those of every fine-tuning recipe.
    """
    yield from _drawn_anew(window)
    if (
        len(window.details) < looks
        or window.details_taken < looks + 1
        or window.step.skipped
        or window.converging
        or window.at_rest
    ):
        return
    recent = list(window.details)[-looks:]
    nothing_moves = window.step.lr == 0 and not any(
        (look["update_ratio"] > 0).any() for look in recent
    )
    if nothing_moves and (window.ever_updated or window.steps_seen < steps):
        # A learning rate of zero for everything: a warm-up's first steps, or the end of a decay.
        return
    still = np.all([look["update_ratio"] == 0 for look in recent], axis=0) | _put_back(recent)
    # A bias before a normalisation layer has a gradient of rounding errors alone.
    still &= window.l2 > _ROUNDING * np.nanmax(window.l2, initial=0.0)
    held = np.array(window.subject.memberships or [0] * len(still)) > 0
    if window.subject.group_of:
        # Gradsight watches only the inner optimizer of a wrapper such as ZeroRedundancyOptimizer.
        held &= np.array([place is not None for place in window.subject.group_of])
    rows = np.flatnonzero(still & held)
    if len(rows):
        text = f"the same before and after the steps {', '.join(str(look.step) for look in recent)}"
        yield Fact(text, window.named(rows), first_step=recent[0].step)


_ROUNDING = 1e-6
"""A gradient that is smaller than this, compared with the largest one, may be a rounding error."""
_ALIKE = 0.5
"""Cosine of two weights above which one may come from the other: clamped, averaged, projected."""


def _drawn_anew(window: Window) -> Iterator[Fact]:
    """Twice in a row, weights were found that have nothing to do with what a step had left."""
    if len(window.details) < 2:
        return
    before, now = list(window.details)[-2:]
    with np.errstate(invalid="ignore"):
        anew = (before["likeness"] < _ALIKE) & (now["likeness"] < _ALIKE)
    rows = np.flatnonzero(anew & (now["weight_rms"] > 0))
    if len(rows):
        alike = float(np.median(now["likeness"][rows]))
        text = (
            f"the weights before the steps {before.step} and {now.step} are not those that the "
            f"step before had left: their cosine is {alike:.2f}"
        )
        yield Fact(text, window.named(rows), first_step=before.step, advice=_NOT_AGAIN)


_NOT_AGAIN = Advice(
    recommendation=(
        "Something draws these weights anew, or loads others, between the steps: look for an "
        "initialisation, a reset or load_state_dict inside the loop."
    ),
    fix="""
# before the loop: show where the loop initialises weights again
# (each layer then keeps its weights and prints the call instead)
import traceback

for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters = lambda *_: traceback.print_stack()
""",
)


def _put_back(looks: Sequence[Details]) -> Flags:
    """Whether a step changed a weight every time, and yet it was the same before each of them."""
    weights = np.array([look["weight_square"] for look in looks])
    moved = np.all([look["update_ratio"] > 0 for look in looks], axis=0)
    same: Flags = moved & (weights == weights[0]).all(axis=0)
    return same
