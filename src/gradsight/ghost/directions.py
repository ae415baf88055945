"""The directions that a pass is scored along, and the row of the table that each one counts for."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradsight.core.sharing import ModelGroup
from gradsight.ghost.gradients import dot

Direction = dict[str, Tensor]
"""A vector in parameter space, by parameter name; a name that is missing stands for zeros."""
Tangents = tuple[tuple[int, Tensor], ...]
"""Pairs of a slot (a row of the table of scores) and the directional derivative counted there."""


class Directions:
    """Every target's direction for one pass, asked for by parameter.

    There is one slot per target, or with `parameters` one per target and parameter.
    """

    def __init__(
        self,
        by_target: Mapping[str, Direction],
        targets: Sequence[str],
        *,
        parameters: Sequence[str] | None = None,
        group: ModelGroup | None = None,
    ) -> None:
        self.slots = len(targets)
        self._place: dict[str, int] | None = None
        if parameters is not None:
            self.slots *= len(parameters)
            self._place = {name: place for place, name in enumerate(parameters)}
        self._by_target = by_target
        self._targets = targets
        self._group = group
        self._known: dict[str, Tangents] = {}

    def tangents(self, name: str) -> Tangents:
        """A parameter's part of each direction that is known, with its slot."""
        known = self._known.get(name)
        if not known:
            # An empty answer is not kept: mode="concat" finds the directions in the backward pass.
            known = self._look_up(name)
            self._known[name] = known
        return known

    def fetch(self, name: str) -> None:
        """Gather a sharded direction's parts in the forward pass, once for the backward pass."""
        # No collective of ours may run inside a backward hook.
        if self._group is not None and self._group.sharded:
            self.tangents(name)

    def slot(self, number: int, name: str) -> int:
        """The row of the table for a target, by its number, and a parameter."""
        if self._place is None:
            return number
        return number * len(self._place) + self._place[name]

    def forget(self, name: str) -> None:
        """A parameter's part is not asked for again."""
        self._known.pop(name, None)

    def _look_up(self, name: str) -> Tangents:
        pairs = []
        for number, target in enumerate(self._targets):
            part = self._by_target.get(target, {}).get(name)
            if part is None:
                continue
            if self._group is not None:
                part = self._group.gather_shards(part)
            pairs.append((self.slot(number, name), part))
        return tuple(pairs)


def cosine(a: Direction, b: Direction, group: ModelGroup) -> Tensor:
    """The cosine of the angle between two directions."""
    pairs = [(a.get(n), b.get(n)) for n in {*a, *b}]
    both = [dot(x, y) for x, y in pairs if x is not None and y is not None]
    first = [dot(x, x) for x, _ in pairs if x is not None]
    second = [dot(y, y) for _, y in pairs if y is not None]
    sums = torch.stack([_sum(both), _sum(first), _sum(second)])
    if group.sharded:
        sums = group.sum(sums)
    return sums[0] / (sums[1] * sums[2]).sqrt()


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum() if values else torch.zeros(())
