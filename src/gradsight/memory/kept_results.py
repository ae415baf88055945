# mypy: allow-untyped-calls
"""The results that a checkpointed block keeps for its recomputation, safe from writes in place.

A result is kept as the tensor that the block goes on with, without a copy. Before the block itself
writes to it, by whatever name or view, the kept one becomes a copy. What happens to it after the
block has returned nobody sees; but torch counts writes, so a changed result is noticed when it is
wanted, and then computed again like all that was not kept. Writes that torch does not count, such
as those of numpy, are not noticed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import _detach_helper

from gradsight.memory.storages import (
    makes_no_view,
    storages,
    tensors_among,
    version_of,
    written_tensors,
)

IsExpensive = Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]
Wants = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], bool]


@dataclass(frozen=True, slots=True)
class MemoryName:
    """A tensor in the memory of a kept leaf that counts writes for itself."""

    leaf: int
    tensor: torch.Tensor
    writes: int | None
    """The count when it was made; None where torch does not count."""

    def is_unwritten(self) -> bool:
        """Whether nobody wrote to the memory under this name."""
        return self.writes is not None and version_of(self.tensor) == self.writes


@dataclass(slots=True)
class KeptResult:
    """One operator's result: its leaves, and what else has the same memory."""

    leaves: list[Any]
    structure: Any
    given: list[tuple[torch.Size, torch.dtype]]
    """Shapes and types of what the operator was given: another call has no use for the result."""
    names: list["MemoryName"] = field(default_factory=list)

    def is_untouched(self) -> bool:
        """Whether nobody wrote to the memory since the result was made."""
        return all(name.is_unwritten() for name in self.names)

    def value(self) -> Any:
        """The result as the operator returned it."""
        return tree_unflatten(self.leaves, self.structure)


class KeptResults:
    """What one call of one block keeps, by operator and number of its call."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, int], KeptResult] = {}
        self._owners: dict[int, tuple[KeptResult, int]] = {}
        """By storage: the result whose memory that is, and which of its leaves."""

    def keep(self, call: tuple[Any, int], given: Any, out: Any) -> None:
        """Keep an operator's result."""
        leaves, structure = tree_flatten(out)
        result = KeptResult(leaves, structure, _shapes(given))
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            # Detached in torch's own way: the same memory, the same count of writes, no graph.
            leaves[number] = _detach_helper(leaf)
            result.names.append(MemoryName(number, leaves[number], version_of(leaf)))
            for storage in storages(leaf):
                self._owners[storage._cdata] = (result, number)
        self._kept[call] = result

    def copy_before_write(self, written: list[torch.Tensor]) -> None:
        """Kept results in the memory that is about to be written to become copies."""
        for tensor in written:
            for storage in storages(tensor):
                owner = self._owners.pop(storage._cdata, None)
                if owner is not None:
                    self._copy(*owner)

    def note_second_name(self, out: Any) -> None:
        """Note a result in the memory of a kept one: it may count its writes by itself.

        Views share the count of what they view. `_unsafe_view`, in which a product of more than two
        dimensions ends, does not.
        """
        for tensor in tensors_among(out):
            for storage in storages(tensor):
                if owner := self._owners.get(storage._cdata):
                    result, leaf = owner
                    name = MemoryName(leaf, _detach_helper(tensor), version_of(tensor))
                    result.names.append(name)

    def take(self, call: tuple[Any, int], given: Any) -> KeptResult | None:
        """The kept result of a call, which is given away; None where it must be computed."""
        result = self._kept.get(call)
        if result is None or result.given != _shapes(given):
            return None
        del self._kept[call]
        return result if result.is_untouched() else None

    def forget_owners(self) -> None:
        """The block has returned: from here on, counts of writes are all that there is."""
        self._owners.clear()

    def _copy(self, result: KeptResult, number: int) -> None:
        """Give a leaf memory of its own, if what is there is still what was computed."""
        if not result.is_untouched():
            return
        result.leaves[number] = result.leaves[number].clone()
        result.names = [name for name in result.names if name.leaf != number]


class KeepingMode(TorchDispatchMode):
    """Around a block's forward: keeps what is wanted, and copies it before it is written to."""

    supports_higher_order_operators = True

    def __init__(self, kept: KeptResults, is_expensive: IsExpensive, wants: Wants) -> None:
        super().__init__()
        self._kept = kept
        self._is_expensive = is_expensive
        self._wants = wants
        self._calls: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Parts of the block that are compiled stay so, as one operator each."""
        return True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kept.forget_owners()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if written := written_tensors(func, args, kwargs):
            self._kept.copy_before_write(written)
        out = func(*args, **kwargs)
        if self._is_expensive(func, args, kwargs):
            call = _numbered(self._calls, func)
            if self._wants(func, args, kwargs, out):
                self._kept.keep(call, (args, kwargs), out)
        elif makes_no_view(func):
            self._kept.note_second_name(out)
        return out


class ReusingMode(TorchDispatchMode):
    """Around a block's recomputation: gives what was kept instead of computing it."""

    supports_higher_order_operators = True

    def __init__(self, kept: KeptResults, is_expensive: IsExpensive) -> None:
        super().__init__()
        self._kept = kept
        self._is_expensive = is_expensive
        self._calls: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Parts of the block that are compiled stay so, as one operator each."""
        return True

    def __enter__(self) -> "ReusingMode":
        self._calls.clear()  # a second backward pass recomputes from the start
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_expensive(func, args, kwargs):
            kept = self._kept.take(_numbered(self._calls, func), (args, kwargs))
            if kept is not None:
                return kept.value()
        return func(*args, **kwargs)


def _numbered(calls: Counter[Any], func: Any) -> tuple[Any, int]:
    """The operator and how often it was called before in this run."""
    number = calls[func]
    calls[func] += 1
    return func, number


def _shapes(value: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_among(value)]
