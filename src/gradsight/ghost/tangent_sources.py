"""Directions on their way from the parameters through operations that no sample takes part in.

A carrier knows the directional derivatives of one tensor. They are computed when a backward pass
asks for them: nothing is held that is not needed, and a direction may become known after the
forward pass.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from gradsight.ghost.derivative import Call, tangents_of

Tangents = tuple[tuple[int, Tensor], ...]
"""Pairs of a slot (a row of the table of scores) and the directional derivative that counts for it.
"""


def keep(look_up: Callable[[str], Tangents]) -> Callable[[str], Tangents]:
    """The function, asked once per name; an empty answer means that the direction is not known yet,
    and is not kept.
    """
    kept: dict[str, Tangents] = {}

    def once(name: str) -> Tangents:
        if not kept.get(name):
            kept[name] = look_up(name)
        return kept[name]

    return once


class Carrier(Protocol):
    """The directional derivatives of one tensor."""

    origins: tuple[str, ...]
    """The parameters it comes from."""
    rows: bool
    """Whether the tensor itself holds rows of samples: one that was changed in place with a
    parameter's help.
    """

    def tangents(self) -> Tangents:
        """Pairs of slot and directional derivative."""
        ...


class Source:
    """A parameter itself: its derivative along a direction is the direction's own part."""

    def __init__(self, name: str, look_up: Callable[[str], Tangents]) -> None:
        self.origins: tuple[str, ...] = (name,)
        self.rows = False
        self._look_up = look_up

    def tangents(self) -> Tangents:
        """The parameter's part of each direction."""
        return self._look_up(self.origins[0])


class Operation:
    """One call with inputs that carry directions: d f = f'(inputs) d inputs, for every slot."""

    def __init__(self, call: Call, flat: Sequence[Any], carried: Mapping[int, Carrier]) -> None:
        self.origins = origins_of(carried.values())
        self.rows = any(carrier.rows for carrier in carried.values())
        self._call = call
        self._flat = list(flat)
        self._carried = carried
        self._result: dict[int, list[Tensor | None]] | None = None

    def output(self, index: int) -> "Output":
        """The carrier of one of the flattened outputs."""
        return Output(self, index)

    def slots(self) -> dict[int, list[Tensor | None]]:
        """The derivatives of every output by slot; computed once the directions are known."""
        if not self._result:
            self._result = push_forward(self._call, self._flat, self._carried)
        return self._result


class Output:
    """One output of an operation."""

    def __init__(self, operation: Operation, index: int) -> None:
        self.origins = operation.origins
        self.rows = operation.rows
        self._operation = operation
        self._index = index

    def tangents(self) -> Tangents:
        """Pairs of slot and directional derivative."""
        found = ((slot, outs[self._index]) for slot, outs in self._operation.slots().items())
        return tuple((slot, tangent) for slot, tangent in found if tangent is not None)


class Fixed:
    """Derivatives that were computed at once, for tensors that change in place."""

    def __init__(self, origins: tuple[str, ...], pairs: Tangents) -> None:
        self.origins = origins
        self.rows = True
        self._pairs = pairs

    def tangents(self) -> Tangents:
        """Pairs of slot and directional derivative."""
        return self._pairs


def origins_of(carriers: Iterable[Carrier]) -> tuple[str, ...]:
    """The names of all parameters that these carriers come from."""
    return tuple(sorted({name for carrier in carriers for name in carrier.origins}))


def push_forward(
    call: Call, flat: Sequence[Any], carried: Mapping[int, Carrier]
) -> dict[int, list[Tensor | None]]:
    """The derivatives of every output, slot by slot; `carried` is keyed by the position of the
    input.
    """
    by_slot: dict[int, dict[int, Tensor]] = {}
    for position, carrier in carried.items():
        for slot, tangent in carrier.tangents():
            by_slot.setdefault(slot, {})[position] = tangent
    return {slot: tangents_of(call, flat, inputs) for slot, inputs in by_slot.items()}
