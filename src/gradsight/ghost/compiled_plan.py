"""What a compiled pass is made of: the rows, the directions and the probes of one block."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsight.core.samples import tensors_in
from gradsight.ghost.compiled_mode import ATTRIBUTE, Scored, TraceableMode
from gradsight.ghost.one_pass import OnePass
from gradsight.ghost.parameters import ScoredParameters

Shapes = tuple[tuple[Any, ...], ...]
"""Shape and type of every tensor of a batch or a call."""


def shapes_of(*values: Any) -> Shapes:
    """What passes are told apart by: compiled code is made for shapes and types.

    >>> shapes_of({"x": torch.zeros(2, 3)})
    ((torch.Size([2, 3]), torch.float32),)
    """
    return tuple((x.shape, x.dtype) for x in tensors_in(*values))


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One block to come, as compiled code would run it."""

    parameters: ScoredParameters
    targets: int
    """How many there are."""
    by_parameter: bool
    given: Mapping[str, tuple[Tensor, ...]]
    """By parameter: each target's direction, or in one pass what scales them all."""
    tied: frozenset[str]
    """Parameters that one pass has as an embedding and as a head."""
    splits_loss: bool
    """Whether the loss is split inside of the pass."""
    seed: Tensor
    """What targets' losses are then pulled back with: the last factor of a GradScaler's, or 1."""

    def mode(self, sizes: tuple[int, ...]) -> TraceableMode:
        """The mode of a pass over the training rows, and in one pass each target's."""
        return TraceableMode(
            sizes, self.seed, splits_loss=self.splits_loss, by_parameter=self.by_parameter
        )

    def probes(self, rows: int) -> "Probes":
        """Zero tables for so many training rows."""
        names = tuple(self.parameters.trainable)
        return Probes(self.parameters, names if self.by_parameter else None, self.targets, rows)

    @contextmanager
    def marked(self, probes: "Probes") -> Iterator[None]:
        """Parameters tell in here what is known of them."""
        named = self.parameters.trainable
        try:
            for name, parameter in named.items():
                known = Scored(probes.of(name), self.given.get(name, ()), tied=name in self.tied)
                setattr(parameter, ATTRIBUTE, known)
            yield
        finally:
            for parameter in named.values():
                if hasattr(parameter, ATTRIBUTE):
                    delattr(parameter, ATTRIBUTE)


class Probes:
    """Zero tables [targets, B] whose gradients are the scores: one, or one per parameter."""

    def __init__(
        self,
        parameters: ScoredParameters,
        names: Sequence[str] | None,
        targets: int,
        rows: int,
    ) -> None:
        self._names = names
        self.leaves = [
            torch.zeros(
                targets,
                rows,
                device=parameters.device,
                dtype=parameters.score_dtype,
                requires_grad=True,
            )
            for _ in names or ("all",)
        ]

    def of(self, name: str) -> Tensor:
        """The probe of a parameter."""
        return self.leaves[0 if self._names is None else self._names.index(name)]

    def table(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The scores [slots, B], from the probes' gradients."""
        found = []
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            found.append(torch.zeros_like(leaf) if gradient is None else gradient.detach())
        return torch.stack(found, 1).flatten(0, 1)


def given_directions(
    parameters: ScoredParameters, directions: Sequence[Mapping[str, Tensor]]
) -> dict[str, tuple[Tensor, ...]]:
    """Each parameter's part of every target's direction; zeros where it has none."""
    given = {}
    for name, parameter in parameters.trainable.items():
        parts = []
        for direction in directions:
            part = direction.get(name)
            parts.append(torch.zeros_like(parameter) if part is None else part)
        given[name] = tuple(parts)
    return given


def given_scales(parameters: ScoredParameters, one_pass: OnePass) -> dict[str, tuple[Tensor, ...]]:
    """By parameter, what one pass scales directions by: nothing, or an optimizer's moments."""
    if one_pass.scales is None:
        return {}
    return {name: one_pass.scales.moments(name) for name in parameters.trainable}
