"""GS503: a rank that stands apart."""

from collections.abc import Iterator

import numpy as np

from gradsight.health.checks.gs504_not_synchronised import updates_differ
from gradsight.health.fixes import OWN_PART_OF_DATA
from gradsight.health.registry import Advice, AsIncident, Asked, Fact, check
from gradsight.health.window import NOTHING, Window
from gradsight.values.measured import Floats, RankComparison

_NORMAL, _LEAST_SPREAD = 1.4826, 0.1
_NEXT_TO_NOTHING = np.log(NOTHING) / 4
"""A part of the other ranks' gradients that is lost in rounding, as a logarithm."""
_FAR = 1000.0
_IN_A_ROW = 3
"""Measured steps at which a jump must last."""


@check(
    "GS503",
    "a rank stands apart",
    "warning",
    asked=Asked(when="ranks", needs=("ranks",)),
    # A NaN of one rank is in the mean too: that one is the incident.
    incident=AsIncident(kept="never"),
    advice=Advice(
        recommendation=(
            "The gradients of one rank differ from those of the others, and the mean carries "
            "them into every replica. Check that rank's data (shard, augmentation, labels), its "
            "loss, and its hardware."
        ),
        fix=OWN_PART_OF_DATA
        + """
# in the loop, before loss.backward(): what does every rank train on?
rank = torch.distributed.get_rank()
print(rank, inputs.float().std().item(), loss.item())
""",
    ),
)
def rank_apart(
    window: Window,
    *,
    factor: float = 5.0,
    jump: float = 10.0,
    sigmas: float = 8.0,
    looks: int = 10,
    full_looks: int = 3,
) -> Iterator[Fact]:
    """A rank's own gradients, before they are averaged, stand apart from the other ranks'.

    Why: a corrupt shard, a broken device or a wrong loss on one rank spoils all of them, and the
    average hides where it came from. Ranks draw from the same data, so their gradients have similar
    sizes, step by step.
    """
    look = window.ranks
    if look is None or len(look.norms) < 2 or look.step in window.left_out:
        return
    if not np.isfinite(look.norms).all():
        yield from _not_finite(window, look)
        return
    if window.digests is not None and updates_differ(window.digests):
        return  # the gradients are those of different models: GS504 tells why
    if (
        len(window.rank_logarithms) >= looks
        and np.abs(_apart(window.rank_logarithms[-1])).max() > np.log(factor) / 2
    ):
        logs = np.array(window.rank_logarithms)
        yield from _all_the_time(window, _apart(logs[-looks:]), np.log(factor))
        yield from _suddenly(window, logs, np.log(jump), sigmas)
    if not look.always.all():
        yield from _in_single_parameters(window, np.log(jump), full_looks)


def _not_finite(window: Window, look: RankComparison) -> Iterator[Fact]:
    broken = ~np.isfinite(look.norms)
    ranks = np.flatnonzero(broken.any(axis=1))
    if len(ranks) < len(broken):  # else the fault is not of a rank
        text = (
            f"step {look.step}: NaN or Inf on {_told(ranks)} alone, before the gradients were "
            f"averaged over {len(broken)} ranks"
        )
        yield Fact(text, window.named(look.rows[broken.any(axis=0)]), "critical", look.step)


def _apart(logs: Floats) -> Floats:
    """How far each rank's logarithm is from the other's, or from the median where there are more
    than two.
    """
    # The median of two lies in their middle: both would be equally far from it.
    result: Floats = logs - (
        logs[..., ::-1] if logs.shape[-1] == 2 else np.median(logs, axis=-1, keepdims=True)
    )
    return result


def _all_the_time(window: Window, apart: Floats, limit: float) -> Iterator[Fact]:
    """At every one of the last looks, on the same side."""
    middle, least = np.median(apart, axis=0), np.abs(apart).min(axis=0)
    same_side = np.abs(np.sign(apart).sum(axis=0)) == len(apart)
    ranks = np.flatnonzero((np.abs(middle) > limit) & (least > limit / 2) & same_side)
    # Of two ranks each is apart from the other.
    if len(middle) == 2 and len(ranks):
        logs = np.median(np.array(window.rank_logarithms)[-len(apart) :], axis=0)
        ranks = np.array([_of_two(logs)])
    for rank in ranks:
        text = f"at each of {len(apart)} measured steps, rank {rank} has {_times(middle[rank])}"
        first_step = window.rank_steps[-len(apart)]
        yield Fact(text, first_step=first_step, advice=_advice(middle[rank]))


def _of_two(logs: Floats) -> int:
    """Which of two ranks is the faulty one, by the logarithms of their gradients' norms.

    It is the one with next to nothing, or of two that are far apart the one whose norm is further
    from 1, in which the norms of ordinary gradients lie. Else it is the larger one.
    """
    lower = int(logs.argmin())
    low, high = logs.min(), logs.max()
    is_far_lower = high - low > np.log(_FAR) and abs(low) > abs(high)
    return lower if low - high < _NEXT_TO_NOTHING or is_far_lower else 1 - lower


def _suddenly(window: Window, logs: Floats, limit: float, sigmas: float) -> Iterator[Fact]:
    """Far above its own past at a few steps in a row, relative to the other ranks and by itself.

    At a single step, a small batch may do that.
    """
    apart = _apart(logs)
    before, now = apart[:-_IN_A_ROW], apart[-_IN_A_ROW:]
    own = logs[-_IN_A_ROW:] - np.median(logs[:-_IN_A_ROW], axis=0)
    usual = np.median(before, axis=0)
    spread = np.maximum(_NORMAL * np.median(np.abs(before - usual), axis=0), _LEAST_SPREAD)
    above = now - usual
    # By itself too: where the others fall to nothing, a rank is far above them and has not moved.
    is_far = (above > limit) & (above > sigmas * spread) & (own > limit / 2)
    for rank in np.flatnonzero(is_far.all(axis=0)):
        times = _times(float(np.median(now[:, rank])))
        first_step = window.rank_steps[-_IN_A_ROW]
        text = f"at {_IN_A_ROW} measured steps in a row, from step {first_step} on, rank {rank}"
        yield Fact(f"{text} has {times}", first_step=first_step)


def _in_single_parameters(window: Window, limit: float, looks: int) -> Iterator[Fact]:
    """Single parameters that matter, at every one of the last complete looks."""
    full = list(window.rank_looks)[-looks:]
    if len(full) < looks or len({each.norms.shape for each in full}) > 1:
        return
    norms = np.stack([each.norms for each in full])
    apart = np.moveaxis(_apart(np.moveaxis(np.log(np.maximum(norms, NOTHING)), 1, -1)), -1, 1)
    matters = norms > 0.01 * np.linalg.norm(norms, axis=2, keepdims=True)
    above = ((apart > limit) & matters).all(axis=0)
    for higher in np.flatnonzero(above.any(axis=1)):
        rows = np.flatnonzero(above[higher])
        rank = int(higher)
        if len(above) == 2:
            typical = np.median(np.linalg.norm(norms[:, :, rows], axis=2), axis=0)
            rank = _of_two(np.log(np.maximum(typical, NOTHING)))
        middle = float(np.median(apart[:, rank, rows]))
        text = (
            f"in {len(rows)} of {above.shape[1]} parameters, at {looks} measured steps, rank "
            f"{rank} has {_times(middle)}"
        )
        names = window.named(full[-1].rows[rows])
        yield Fact(text, names, first_step=full[0].step, advice=_advice(middle))


def _advice(logarithm: float) -> Advice | None:
    return _DEAD_RANK if logarithm < -np.log(_FAR) else None


_DEAD_RANK = Advice(
    recommendation=(
        "This rank adds next to nothing to the mean, which is then too small by its share. Check "
        "the rank's loss (a factor of zero, a different branch), its labels (all ignored?) and "
        "its data."
    ),
    fix="""
# in the loop, before loss.backward(): compare the ranks
rank = torch.distributed.get_rank()
print(rank, inputs.float().std().item(), loss.item())
""",
)


def _times(logarithm: float) -> str:
    if logarithm < _NEXT_TO_NOTHING:
        return "almost no gradient, unlike the others"
    return f"{np.exp(min(logarithm, 50.0)):.3g} times the gradient of the others"


def _told(ranks: object) -> str:
    found = [str(rank) for rank in np.atleast_1d(np.asarray(ranks)).tolist()]
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found)}"
