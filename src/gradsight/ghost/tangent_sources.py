"""Directions on their way from the parameters through operations that no sample takes part in.

A source knows the directional derivatives of one tensor. They are computed when a backward pass
asks for them: nothing is held that is not needed, and a direction may become known after the
forward pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from gradsight.ghost.derivative import OperatorCall, tangents_of
from gradsight.ghost.directions import Directions, Tangents


class TangentSource(Protocol):
    """The directional derivatives of one tensor."""

    origins: tuple[str, ...]
    """The parameters it comes from."""
    rows: bool
    """Whether the tensor holds rows of samples: one changed in place with a parameter's help."""

    def tangents(self) -> Tangents:
        """Pairs of slot and directional derivative."""
        ...


class ParameterTangents:
    """A parameter itself: its derivative along a direction is the direction's own part."""

    def __init__(self, name: str, directions: Directions) -> None:
        self.origins: tuple[str, ...] = (name,)
        self.rows = False
        self._directions = directions

    def tangents(self) -> Tangents:
        """The parameter's part of each direction."""
        return self._directions.tangents(self.origins[0])


class OperationTangents:
    """One call with inputs that carry directions: d f = f'(inputs) d inputs, for every slot."""

    def __init__(
        self, call: OperatorCall, flat: Sequence[Any], carried: Mapping[int, TangentSource]
    ) -> None:
        self.origins = origins_of(carried.values())
        self.rows = any(source.rows for source in carried.values())
        self._call = call
        self._flat = list(flat)
        self._carried = carried
        self._result: dict[int, list[Tensor | None]] | None = None

    def output(self, index: int) -> "OutputTangents":
        """The source of one of the flattened outputs."""
        return OutputTangents(self, index)

    def slots(self) -> dict[int, list[Tensor | None]]:
        """The derivatives of every output by slot; computed once the directions are known."""
        if not self._result:
            self._result = push_forward(self._call, self._flat, self._carried)
        return self._result


class OutputTangents:
    """One output of an operation."""

    def __init__(self, operation: OperationTangents, index: int) -> None:
        self.origins = operation.origins
        self.rows = operation.rows
        self._operation = operation
        self._index = index

    def tangents(self) -> Tangents:
        """Pairs of slot and directional derivative."""
        pairs = ((slot, outs[self._index]) for slot, outs in self._operation.slots().items())
        return tuple((slot, tangent) for slot, tangent in pairs if tangent is not None)


class FixedTangents:
    """Derivatives that were computed at once, for tensors that change in place."""

    def __init__(self, origins: tuple[str, ...], pairs: Tangents) -> None:
        self.origins = origins
        self.rows = True
        self._pairs = pairs

    def tangents(self) -> Tangents:
        """Pairs of slot and directional derivative."""
        return self._pairs


def origins_of(sources: Iterable[TangentSource]) -> tuple[str, ...]:
    """The names of all parameters that these sources come from."""
    return tuple(sorted({name for source in sources for name in source.origins}))


def push_forward(
    call: OperatorCall, flat: Sequence[Any], carried: Mapping[int, TangentSource]
) -> dict[int, list[Tensor | None]]:
    """The derivatives of every output by slot; `carried` is keyed by the input's position."""
    by_slot: dict[int, dict[int, Tensor]] = {}
    for position, source in carried.items():
        for slot, tangent in source.tangents():
            by_slot.setdefault(slot, {})[position] = tangent
    return {slot: tangents_of(call, flat, inputs) for slot, inputs in by_slot.items()}
