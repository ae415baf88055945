"""GS408: matrices in the wrong group of an optimizer."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window
from gradsight.values.measured import Flags, Floats
from gradsight.values.steps import block_of

_LOW_RANK = 16
"""A matrix with a side this short, and another at least twice as long, may be an adapter's."""


@check(
    "GS408",
    "moves unlike its peers",
    "warning",
    asked=Asked(when="look", needs=("details", "optimizer")),
    advice=Advice(
        recommendation=(
            "These matrices have another learning rate, or another optimizer, than those around "
            "them: look at the rule that sorts parameters into groups (a name that matches too "
            "much, a shape that matches too little)."
        ),
        fix="""
# before the loop: list the matrices of each group
names = {id(each): name for name, each in model.named_parameters()}
for number, group in enumerate(optimizer.param_groups):
    matrices = [each for each in group["params"] if each.dim() > 1]
    print(number, group["lr"], [names.get(id(each)) for each in matrices])

# before the loop: use the rate of the largest group for all groups
# (if the rates are not meant to differ)
def size(group):
    return sum(each.numel() for each in group["params"])

largest = max(optimizer.param_groups, key=size)
for group in optimizer.param_groups:
    group["lr"] = largest["lr"]
""",
    ),
)
def unlike_peers(window: Window, *, factor: float = 8.0, patience: int = 2) -> Iterator[Fact]:
    """Some matrices move far less or far more than their peers, because of their group.

    Why: one of them was sorted into the wrong group and stands still, or runs away, while the loss
    only looks a little worse. Rates that go by depth, as layer-wise decay, a frozen-like body with
    a fast head, or the two halves of a low-rank adapter are meant to differ, and are left alone.
    """
    rows = _peers(window)
    if len(rows) < 4 or len({_setting(window, row) for row in rows}) < 2:
        return
    moved = np.log(window.details[-1]["update_rms"][rows])
    rates = np.log([_rate(window, row) for row in rows])
    away = _away(moved, np.log(factor)) & _is_of_another_group(window, rows, rates, np.log(factor))
    outliers = [row for row, is_away in zip(rows, away.tolist(), strict=True) if is_away]
    if not outliers or 2 * len(outliers) >= len(rows) or _goes_by_depth(window, rows):
        return
    apart = moved[away] - np.median(moved)
    how = "less" if apart.mean() < 0 else "more"
    times = float(np.exp(np.abs(apart).mean()))
    yield Fact(
        f"{len(outliers)} of {len(rows)} matrices move {times:.0f} times {how} than their peers: "
        f"{_described(window, outliers[0])} against {_described(window, _typical(rows, moved))}",
        window.named(outliers),
        first_step=window.first_step,
    )


def _peers(window: Window) -> list[int]:
    """Matrices that an optimizer moves, and that are no half of an adapter."""
    subject = window.subject
    moved = window.details[-1]["update_rms"]
    return [
        row
        for row in subject.matrices
        if row < len(subject.group_of)
        and subject.group_of[row] is not None
        and subject.trainable[row]
        and moved[row] > 0
        and _rate(window, row) > 0
        and not _is_of_an_adapter(subject.names[row], subject.shapes[row])
    ]


def _is_of_an_adapter(name: str, shape: tuple[int, ...]) -> bool:
    if "lora" in name.lower() or "adapter" in name.lower():
        return True
    return len(shape) == 2 and min(shape) <= _LOW_RANK and max(shape) >= 2 * min(shape)


def _setting(window: Window, row: int) -> tuple[str, float]:
    group = window.subject.groups[window.subject.group_of[row] or 0]
    return group.optimizer, group.lr


def _rate(window: Window, row: int) -> float:
    return _setting(window, row)[1]


def _away(moved: Floats, limit: float) -> Flags:
    away: Flags = np.abs(moved - np.median(moved)) > limit
    return away


def _is_of_another_group(window: Window, rows: Sequence[int], rates: Floats, limit: float) -> Flags:
    """Whether its rate is as far from the usual one, or its optimizer is not that of most."""
    optimizers = [_setting(window, row)[0] for row in rows]
    usual = max(set(optimizers), key=optimizers.count)
    other_optimizer = np.array([each != usual for each in optimizers])
    result: Flags = other_optimizer | (np.abs(rates - np.median(rates)) > limit)
    return result


def _goes_by_depth(window: Window, rows: Sequence[int]) -> bool:
    """Whether every block has one setting, and these only rise or only fall with depth.

    The first and the last may have a rate of their own.
    """
    by_block: dict[str, set[tuple[str, float]]] = {}
    for row in rows:
        block = block_of(window.subject.names[row])
        by_block.setdefault(block, set()).add(_setting(window, row))
    if any(len(settings) > 1 for settings in by_block.values()):
        return False
    rates = [next(iter(settings))[1] for settings in by_block.values()]
    if len(set(rates[1:-1])) == 1:
        return True
    rises = all(one <= other for one, other in pairwise(rates))
    return rises or all(one >= other for one, other in pairwise(rates))


def _typical(rows: Sequence[int], moved: Floats) -> int:
    return rows[int(np.argsort(moved)[len(rows) // 2])]


def _described(window: Window, row: int) -> str:
    optimizer, rate = _setting(window, row)
    return f"{window.subject.names[row]} with {optimizer.rpartition(' ')[0]} at {rate:.2g}"
