"""Whether a large norm is only a unit: a loss that is a sum has one, and harms nobody.

What counts is what the step does to the weights. A norm is pardoned where it was as large from the
start on, steps are known to be short, and the loss falls. Whoever sees one look only, or no update,
has the norm alone to go by.
"""

import numpy as np

from gradsight.health.window import Window

_GROWN = 10.0
"""So many times the first norms is growth: an explosion, not a unit."""
_SHORT = (1e-5, 0.25)
"""Updates of such a part of the weights are short: up to half of GS401's limit.

Where they are next to nothing, no loss can show that all is well.
"""
_STEPS_UNTIL_THE_LOSS_TELLS = 50
_FALLEN = 0.01
_MANY_PASSES = 8


def is_only_a_unit(window: Window) -> bool:
    """Whether the large norm of this step does no harm, as far as is known."""
    usual = np.median(window.first_totals) if window.first_totals else 0.0
    if window.total > _GROWN * usual:
        return False
    if not steps_are_short(window):
        return False
    if window.steps_seen <= _STEPS_UNTIL_THE_LOSS_TELLS:
        return True
    if not window.losses or _sums_episodes(window):
        # An optimizer that divides the gradient's size away has no use for its unit.
        return window.subject.normalising
    return _has_fallen(window)


def steps_are_short(window: Window) -> bool:
    """Return whether the last detailed measurement found short updates; False without one."""
    if not window.details:
        return False
    ratios = window.details[-1]["update_ratio"]
    known = ratios[~np.isnan(ratios) & ~window.started_at_zero]
    return len(known) > 0 and bool(_SHORT[0] < np.median(known) < _SHORT[1])


def _sums_episodes(window: Window) -> bool:
    """Return whether a step adds up one backward pass for each moment of an episode.

    The norm then grows with the episodes, and the loss of one moment tells nothing.
    """
    return len(window.pass_counts) > 1 and max(window.pass_counts) >= _MANY_PASSES


def _has_fallen(window: Window) -> bool:
    first = float(np.median(window.first_losses))
    last = float(np.median(list(window.losses)[-10:]))
    return last < first - _FALLEN * abs(first)
