"""How targets lie to what was looked up: at the same place, or moved ahead."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from gradsight.first_step.operations import SeenTargets

_AHEAD = 4
"""How far targets may be moved ahead."""
_FEWEST = 4
"""Labels that must be compared."""
_FEWEST_PLACES = 2
"""Positions that must be compared where targets may be moved ahead."""
_SHARE = 0.9


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Targets and the inputs that they are; rows first, then time."""

    source: Tensor
    """What the model was given, as it was given."""
    time_first: bool
    ahead: int
    """How far the targets are moved; 0: they are the inputs at the same place."""
    share: float
    """Of the labels that count, those that are the inputs there."""
    counts: Tensor
    """[rows, time]: which positions have a label that counts."""


def find_placements(source: Tensor, targets: Sequence[SeenTargets]) -> list[Placement]:
    """Return where an input contains the targets; empty if it does not, or if that is unclear.

    If the targets are not shifted, both orders of batch and time can fit.
    """
    candidates = [placement for each in targets for placement in _placements(source, each)]
    candidates.sort(key=lambda placement: placement.share, reverse=True)
    if not candidates or candidates[0].share < _SHARE:
        return []
    best = candidates[0]
    # Sequences of one token are their own neighbours: they tell nothing.
    rivals = [each for each in candidates if each.ahead != best.ahead]
    if any(rival.share >= best.share for rival in rivals):
        return []
    if best.ahead:
        return [best]
    other = (each for each in candidates[1:] if each.time_first != best.time_first)
    return [best, *(each for each in islice(other, 1) if each.share == best.share)]


def _placements(source: Tensor, targets: SeenTargets) -> Iterator[Placement]:
    if source.dim() < 2 or (not source.is_floating_point() and source.dim() > 2):
        return
    for time_first in (False, True):
        given = source.transpose(0, 1) if time_first else source
        length = given.shape[1]
        for missing in range(min(3, length)):
            placed = placed_targets(given, targets, length - missing, time_first)
            if placed is None:
                continue
            values, counts = placed
            for ahead in range(_AHEAD + 1):
                share = _share(given, values, counts, ahead)
                if share is not None:
                    yield Placement(source, time_first, ahead, share, _padded(counts, length))
            break


def placed_targets(
    given: Tensor, targets: SeenTargets, length: int, time_first: bool
) -> tuple[Tensor, Tensor] | None:
    """The targets as [rows, time, ...], where they have that many entries."""
    shape = (given.shape[0], length, *given.shape[2:])
    if targets.values.numel() != given[:, :length].numel() or not length:
        return None
    values = targets.values
    counts = targets.counts
    laid = (shape[1], shape[0], *shape[2:]) if time_first else shape
    if values.dim() >= 2 and tuple(values.shape[:2]) == (laid[1], laid[0]) != laid[:2]:
        values = values.transpose(0, 1)
        counts = counts.transpose(0, 1)
    values = values.reshape(laid)
    counts = counts.reshape(laid)
    if time_first:
        values = values.transpose(0, 1)
        counts = counts.transpose(0, 1)
    return values, counts.reshape(shape[0], length, -1).any(-1)


def _share(given: Tensor, values: Tensor, counts: Tensor, ahead: int) -> float | None:
    """Of the labels that count, how many are the inputs so far ahead."""
    length = min(values.shape[1], given.shape[1] - ahead)
    if length < 1 or given.dtype.is_floating_point != values.dtype.is_floating_point:
        return None
    same = values[:, :length] == given[:, ahead : ahead + length]
    same = same.reshape(*same.shape[:2], -1).all(-1)
    compared = counts[:, :length]
    total = int(compared.sum())
    # One place tells nothing: values in reverse order have one that fits as well.
    if total < _FEWEST or 2 * total < int(counts.sum()):
        return None
    if ahead and length < _FEWEST_PLACES:
        return None
    return float((same & compared).sum()) / total


def _padded(counts: Tensor, length: int) -> Tensor:
    missing = length - counts.shape[1]
    if not missing:
        return counts
    return torch.cat([counts, counts.new_zeros(counts.shape[0], missing)], 1)
