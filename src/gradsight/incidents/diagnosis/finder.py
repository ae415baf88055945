# mypy: allow-untyped-calls
"""Follows what is not finite from the operation that made it to where it ends."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsight.core.calls import CallNumber
from gradsight.core.passes import this_thread
from gradsight.core.samples import tensors_in
from gradsight.incidents.diagnosis.numbers import dtype_name, nonfinite_in, summary
from gradsight.incidents.diagnosis.places import NOWHERE, SourcePlace, current_place, source_of
from gradsight.incidents.diagnosis.watcher import (
    Budget,
    OperationWatcher,
    key_of,
    operation_name,
    written,
)
from gradsight.values.diagnoses import GuiltyOperation

FILLS = frozenset(
    {
        "full", "full_like", "new_full", "scalar_tensor", "fill", "fill_", "masked_fill",
        "masked_fill_", "index_fill", "index_fill_", "constant_pad_nd", "constant",
    }
)  # fmt: skip
"""Operations that write a given number: an infinity of theirs is meant (attention masks)."""
OVERWRITING = frozenset(
    {
        "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_",
        "resize_",
    }
)  # fmt: skip
"""Operations in place that do not read what they write to."""
UNINITIALISED = frozenset(
    {
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
        "resize_",
    }
)  # fmt: skip
"""Operations whose result holds whatever the memory held: nothing can be said of it yet."""

Origins = frozenset[int]
"""The events that explain why a tensor is not finite, by their number."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was not finite came into the pass here."""

    operation: GuiltyOperation
    certain: bool = True
    """False for infinities that may be meant: they count where nothing else explains the end."""


@dataclass(frozen=True, slots=True)
class Input:
    """An argument of an operation as it was before the call."""

    key: int
    value: Tensor


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that has run: where, on what, and what it made."""

    name: str
    place: SourcePlace
    inputs: Sequence[Input]
    outputs: Sequence[Tensor]


# Not torch's detect_anomaly: it misses infinities, and NaN that the forward pass has made.
class Finder(OperationWatcher):
    """Watches a forward and a backward pass, and says which operation broke what came of them.

    An operation with finite inputs and a non-finite output is an event, and so is one that makes
    NaN out of infinities that are meant. What is computed from an event's output carries it on
    while it is not finite. So a fault that heals (a mask's -inf after softmax, the unused side of a
    where) is never blamed, and a fault is blamed where it began.
    """

    def __init__(
        self, names: Mapping[int, str], number: CallNumber, caller: str | None, budget: Budget
    ) -> None:
        super().__init__(budget)
        self.events: list[Event] = []
        self._names = names
        self._number = number
        self._caller = caller
        self._marks: dict[int, Origins] = {}
        self._made: dict[int, tuple[list[int], list[SourcePlace]]] = {}
        """By thread: autograd's numbers when operations ran, and their places.

        On an accelerator backward has a thread of its own, which counts by itself.
        """

    def expect(self, tensor: Tensor, event: Event) -> None:
        """This tensor comes into the pass and is not finite."""
        self._mark(key_of(tensor), self._new(event))

    def first(
        self, tensors: Iterable[Tensor | None], *, certain: bool = False
    ) -> GuiltyOperation | None:
        """The earliest operation that these tensors' NaN and infinities come from.

        `certain`: none whose infinity may be meant.
        """
        numbers: set[int] = set()
        for tensor in tensors:
            if tensor is not None and nonfinite_in(tensor):
                numbers |= self._marks.get(key_of(tensor), frozenset())
        ranked = sorted(numbers, key=lambda number: (not self.events[number].certain, number))
        if not ranked:
            return None
        event = self.events[ranked[0]]
        if certain and not event.certain:
            return None
        return event.operation

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, then look at what it made."""
        self._budget.check()
        kwargs = kwargs or {}
        place = current_place(self._names)
        # Autograd numbers its nodes as they are made: by that number, backward finds the place of
        # the forward operation that a node belongs to.
        sequence, places = self._made.setdefault(this_thread(), ([], []))
        sequence.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        places.append(place)
        inputs = _inputs(func, args, kwargs)
        given = {key_of(tensor) for tensor in tensors_in(*args, *kwargs.values())}
        changed = {key_of(tensor) for tensor in written(func, args, kwargs)}
        out = self.run(func, args, kwargs)
        # Views of memory that was not written to: what is known of it holds.
        views = given - changed
        made = [tensor for tensor in tensors_in(out) if key_of(tensor) not in views]
        self._judge(Operation(operation_name(func), place, inputs, made), given)
        return out

    def _judge(self, operation: Operation, given: set[int]) -> None:
        """Mark every output that is not finite with where that comes from."""
        origins: Origins | None = None
        for tensor in operation.outputs:
            key = key_of(tensor)
            if key not in given:
                self._marks.pop(key, None)
            if operation.name in UNINITIALISED or not nonfinite_in(tensor):
                continue
            if origins is None:
                origins = self._origins(operation)
            self._mark(key, origins)

    def _mark(self, key: int, origins: Origins) -> None:
        self._marks[key] = self._marks.get(key, frozenset()) | origins

    def _origins(self, operation: Operation) -> Origins:
        """Why outputs are not finite: an input's NaN, else an infinity, else this operation."""
        states = [
            (nonfinite_in(each.value), self._marks.get(each.key)) for each in operation.inputs
        ]
        of_nan = [marks for state, marks in states if state == "nan" and marks is not None]
        if of_nan:
            return frozenset().union(*of_nan)
        infinite = [marks for state, marks in states if state == "inf"]
        of_inf: Origins = frozenset().union(*(marks for marks in infinite if marks))
        made_nan = any(nonfinite_in(tensor) == "nan" for tensor in operation.outputs)
        if not made_nan:
            meant = bool(infinite) or operation.name in FILLS
            return of_inf or self._new(Event(self._describe(operation), certain=not meant))
        certain = frozenset(number for number in of_inf if self.events[number].certain)
        return certain or self._from_arguments(operation, of_inf) or self._begun_at(operation)

    def _from_arguments(self, operation: Operation, infinities: Origins) -> Origins:
        """Infinities that came into the pass from outside, unless they mask something here."""
        if "softmax" in operation.name or "attention" in operation.name:
            return frozenset()  # a row that is all masked: NaN begins here, the mask was meant
        return frozenset(n for n in infinities if self.events[n].operation.phase == "before")

    def _begun_at(self, operation: Operation) -> Origins:
        return self._new(Event(self._describe(operation)))

    def _new(self, event: Event) -> Origins:
        self.events.append(event)
        return frozenset({len(self.events) - 1})

    def _describe(self, operation: Operation) -> GuiltyOperation:
        name = readable(operation.name, operation.outputs)
        phase = "forward"
        detail = ""
        place = operation.place
        node = torch._C._current_autograd_node()
        if node is not None and not place.recomputed:
            phase = "backward"
            forward_place = self._place_of(node)
            if place.file is None:
                # No Python of a custom backward: what the user wrote is the forward operation.
                forward = forward_name(node.name())
                if name != forward:
                    detail = f"{name} in the backward of {forward}"
                name = forward
                place = forward_place
            else:
                place = replace(place, module=forward_place.module)
        line = place.place or self._caller
        values = [each.value for each in operation.inputs if each.value.is_floating_point()]
        return GuiltyOperation(
            operation=name,
            phase=phase,
            module=place.module,
            place=line,
            source=source_of(line),
            inputs=tuple(summary(value) for value in values),
            micro_batch=self._number.micro_batch,
            detail=detail,
            call=self._number.named_call,
            calls=self._number.calls,
        )

    def _place_of(self, node: Any) -> SourcePlace:
        """The place of a node's forward operation: the first that ran after the node was made."""
        number = node._sequence_nr()
        for sequence, places in self._made.values():
            position = bisect_right(sequence, number)
            # A thread whose first operation ran later has not made it.
            if position < len(places) and (position or sequence[0] == number + 1):
                return places[position]
        return NOWHERE


def _inputs(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Input]:
    """The tensors that an operation reads; those that it changes as copies."""
    changed = {id(tensor) for tensor in written(func, args, kwargs)}
    overwrites = operation_name(func) in OVERWRITING or "out" in kwargs
    inputs = []
    for tensor in tensors_in(*args, *kwargs.values()):
        if id(tensor) not in changed:
            inputs.append(Input(key_of(tensor), tensor))
        elif not overwrites:
            inputs.append(Input(key_of(tensor), tensor.clone()))
    return inputs


def readable(name: str, outputs: Sequence[Tensor]) -> str:
    """An operation's name as its user would write it.

    >>> readable("_to_copy", [torch.zeros(1, dtype=torch.float16)]), readable("_log_softmax", [])
    ('to(float16)', 'log_softmax')
    """
    if name in {"_to_copy", "to"} and outputs:
        return f"to({dtype_name(outputs[0].dtype)})"
    if "scaled_dot_product" in name:
        return "scaled_dot_product_attention"
    return name.strip("_")


def forward_name(node: str) -> str:
    """The forward operation of an autograd node.

    >>> forward_name("SqrtBackward0"), forward_name("NativeLayerNormBackward0")
    ('sqrt', 'native_layer_norm')
    >>> forward_name("torch::autograd::CopySlices")
    'copy_slices'
    """
    plain = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return readable(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower(), [])
