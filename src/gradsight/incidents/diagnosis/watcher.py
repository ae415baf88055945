# mypy: allow-untyped-calls
"""What sees the operations of a pass that is run again, and stops it when its time is over."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradsight.core.layouts import entries, is_plain
from gradsight.core.samples import tensors_in


class OutOfTime(BaseException):
    """The time is over; not an Exception, so that no model's own `except Exception` keeps it."""


class Budget:
    """The time that a diagnosis may take, counted from the making of this."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._start

    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.spent() > self.seconds

    def check(self) -> None:
        """Stop the work here if the time is over."""
        if self.is_over():
            raise OutOfTime


class OperationWatcher(TorchDispatchMode):
    """A mode that sees every operation of eager code, within a budget of time.

    Memory from before it that an operation writes to (a parameter, a queue that a model keeps) is
    copied first, and can be put back.
    """

    supports_higher_order_operators = True

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self._budget = budget
        self._born: set[int] = set()
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To be skipped is to import the compiler, which takes seconds; and where that is loaded
        # already, its code runs eagerly in a replay.
        return False

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operation itself."""
        given = {key_of(tensor) for tensor in tensors_in(*args, *kwargs.values())}
        for tensor in written(func, args, kwargs):
            key = key_of(tensor)
            if key not in self._born and key not in self._saved:
                # The whole storage: other views of it see what is written too.
                storage = tensor.untyped_storage()
                self._saved[key] = (storage, storage.clone())
        out = func(*args, **kwargs)
        self._born |= {key_of(tensor) for tensor in tensors_in(out)} - given
        return out

    @contextmanager
    def writes_undone(self) -> Iterator[None]:
        """What is written in here to memory from before is undone at the end."""
        try:
            yield
        finally:
            for storage, before in self._saved.values():
                storage.copy_(before)
            self._saved.clear()


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes."""
    schema = getattr(func, "_schema", None)  # a higher-order operation has none
    if schema is None or not schema.is_mutable:
        return []
    changed = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            changed.append(given)
    return tensors_in(*changed)


def key_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory, which its views share."""
    plain = tensor if is_plain(tensor) else entries(tensor)
    return int(plain.untyped_storage()._cdata)


def operation_name(func: Any) -> str:
    """An operation's name without its overload."""
    packet = getattr(func, "overloadpacket", None)
    return str(func.name() if packet is None else packet.__name__)
