# mypy: allow-untyped-calls
"""Follows every operation of a pass, and what is not finite from the operation that made it to
where it ends.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsight.core.samples import tensors_in
from gradsight.incidents.diagnosis.budget import Budget
from gradsight.incidents.diagnosis.modes import Eyes, key_of, name_of, written
from gradsight.incidents.diagnosis.numbers import dtype_name, state_of, summary
from gradsight.incidents.diagnosis.places import Scene, look, source_of
from gradsight.values.diagnoses import GuiltyOperation

FILLS = frozenset(
    {
        "full",
        "full_like",
        "new_full",
        "scalar_tensor",
        "fill",
        "fill_",
        "masked_fill",
        "masked_fill_",
    }
    | {"index_fill", "index_fill_", "constant_pad_nd", "constant"}
)
"""Operations that write a given number: an infinity of theirs is meant (attention masks)."""
OVERWRITING = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
        "random_",
        "resize_",
    }
)
"""Operations in place that do not read what they write to."""
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
    }
)

Origins = frozenset[int]
"""The events that explain why a tensor is not finite, by their number."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was not finite came into the pass here."""

    operation: GuiltyOperation
    certain: bool = True
    """False for infinities that may be meant: they count only where nothing else explains the end.
    """


@dataclass(frozen=True, slots=True)
class Input:
    """An argument of an operation as it was before the call."""

    key: int
    value: Tensor


class Finder(Eyes):
    """Watches a forward and a backward pass; `first(tensors)` is the operation that explains why
    they are not finite.

    An operation with finite inputs and a non-finite output is an event, and so is one that makes
    NaN out of infinities that are meant. What is computed from an event's output carries it on
    while it is not finite. So a fault that heals (a mask's -inf after softmax, the unused side of a
    where) is never blamed, and a fault is blamed where it began.
    """

    def __init__(
        self, names: Mapping[int, str], micro_batch: int, caller: str | None, budget: Budget
    ) -> None:
        super().__init__()
        self.whole_step = False
        """Whether the loss is computed under these eyes too, so that what runs in no module of the
        model belongs to it.
        """
        self.events: list[Event] = []
        self._names, self._micro_batch, self._caller, self._budget = (
            names,
            micro_batch,
            caller,
            budget,
        )
        self._marks: dict[int, Origins] = {}
        self._sequence: list[int] = []
        self._scenes: list[Scene] = []

    def expect(self, tensor: Tensor, event: Event) -> None:
        """This tensor comes into the pass and is not finite."""
        key = key_of(tensor)
        self._marks[key] = self._marks.get(key, frozenset()) | self._new(event)

    def first(
        self, tensors: Iterable[Tensor | None], *, certain: bool = False
    ) -> GuiltyOperation | None:
        """The earliest event that these tensors' NaN and infinities come from; `certain`: none that
        may be meant.
        """
        found: set[int] = set()
        for tensor in tensors:
            if tensor is not None and state_of(tensor):
                found |= self._marks.get(key_of(tensor), frozenset())
        ranked = sorted(found, key=lambda number: (not self.events[number].certain, number))
        if not ranked or (certain and not self.events[ranked[0]].certain):
            return None
        return self.events[ranked[0]].operation

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
        scene = look(self._names)
        self._sequence.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._scenes.append(scene)
        inputs = _inputs(func, args, kwargs)
        given = {key_of(tensor) for tensor in tensors_in(*args, *kwargs.values())}
        views = given - {key_of(tensor) for tensor in written(func, args, kwargs)}
        out = self.run(func, args, kwargs)
        outs = [
            tensor for tensor in tensors_in(out) if key_of(tensor) not in views
        ]  # what is known of their memory holds
        self._judge(func, scene, inputs, given, outs)
        return out

    def _judge(
        self, func: Any, scene: Scene, inputs: list[Input], given: set[int], outs: list[Tensor]
    ) -> None:
        """Mark every output that is not finite with where that comes from."""
        origins: Origins | None = None
        for tensor in outs:
            key, state = key_of(tensor), "" if name_of(func) in UNINITIALISED else state_of(tensor)
            if key not in given:
                self._marks.pop(key, None)
            if state:
                if origins is None:
                    origins = self._origins(func, scene, inputs, outs)
                self._marks[key] = self._marks.get(key, frozenset()) | origins

    def _origins(self, func: Any, scene: Scene, inputs: list[Input], outs: list[Tensor]) -> Origins:
        """Why outputs are not finite: an input with NaN, else one with an infinity, else this
        operation itself.
        """
        states = [(state_of(each.value), self._marks.get(each.key)) for each in inputs]
        of_nan = [marks for state, marks in states if state == "nan" and marks is not None]
        if of_nan:
            return frozenset().union(*of_nan)
        infinite = [marks for state, marks in states if state == "inf"]
        of_inf: Origins = frozenset().union(*(marks for marks in infinite if marks))
        made_nan = any(state_of(tensor) == "nan" for tensor in outs)
        if not made_nan:
            meant = bool(infinite) or name_of(func) in FILLS
            return of_inf or self._new(
                Event(self._describe(func, scene, inputs, outs), certain=not meant)
            )
        certain = frozenset(number for number in of_inf if self.events[number].certain)
        masking = "softmax" in name_of(func) or "attention" in name_of(func)
        came = frozenset(
            number
            for number in of_inf
            if self.events[number].operation.phase == "before" and not masking
        )
        return certain or came or self._new(Event(self._describe(func, scene, inputs, outs)))

    def _new(self, event: Event) -> Origins:
        self.events.append(event)
        return frozenset({len(self.events) - 1})

    def _describe(
        self, func: Any, scene: Scene, inputs: list[Input], outs: list[Tensor]
    ) -> GuiltyOperation:
        operation, phase, detail = readable(name_of(func), outs), "forward", ""
        node = torch._C._current_autograd_node()
        if node is not None and not scene.recomputed:
            phase, made = "backward", self._made(node)
            if (
                scene.file is None
            ):  # no Python of a custom backward: what the user wrote is the forward operation
                forward = forward_name(node.name())
                detail = f"{operation} in the backward of {forward}" if operation != forward else ""
                operation, scene = forward, made
            else:
                scene = Scene(made.module, scene.file, scene.line, scene.recomputed)
        if scene.module is None and self.whole_step:
            phase = "loss"
        place = scene.place or self._caller
        found = tuple(summary(each.value) for each in inputs if each.value.is_floating_point())
        return GuiltyOperation(
            operation,
            phase,
            scene.module,
            place,
            source_of(place),
            found,
            self._micro_batch,
            detail,
        )

    def _made(self, node: Any) -> Scene:
        """The scene of the forward operation that this node belongs to: the first that ran after
        the node was made.
        """
        position = bisect_right(self._sequence, node._sequence_nr())
        return (
            self._scenes[position] if position < len(self._scenes) else Scene(None, None, 0, False)
        )


def _inputs(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Input]:
    """The tensors that an operation reads; those that it changes as copies."""
    changed = {id(tensor) for tensor in written(func, args, kwargs)}
    unread = changed if name_of(func) in OVERWRITING or "out" in kwargs else set[int]()
    return [
        Input(key_of(tensor), tensor.clone() if id(tensor) in changed else tensor)
        for tensor in tensors_in(*args, *kwargs.values())
        if id(tensor) not in unread
    ]


def readable(name: str, outs: Sequence[Tensor]) -> str:
    """An operation's name as its user would write it.

    >>> readable("_to_copy", [torch.zeros(1, dtype=torch.float16)]), readable("_log_softmax", [])
    ('to(float16)', 'log_softmax')
    """
    if name in {"_to_copy", "to"} and outs:
        return f"to({dtype_name(outs[0].dtype)})"
    if "scaled_dot_product" in name:
        return "scaled_dot_product_attention"
    return name.strip("_")


def forward_name(node: str) -> str:
    """The forward operation of an autograd node.

    >>> forward_name("SqrtBackward0"), forward_name("NativeLayerNormBackward0"), forward_name("torch::autograd::CopySlices")
    ('sqrt', 'native_layer_norm', 'copy_slices')
    """
    plain = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return readable(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower(), [])
