# mypy: allow-untyped-calls
"""What our dispatch modes have in common: they see every operation, and what is written in place
can be put back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradsight.core.samples import tensors_in


class Eyes(TorchDispatchMode):
    """A mode that watches operations in eager code.

    Memory from before it that an operation writes to (a parameter, a queue that a model keeps) is
    copied first.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._born: set[int] = set()
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to be skipped is to import the compiler, seconds, and where it is loaded already, its
        code runs eagerly.
        """
        return False

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operation itself."""
        given = {key_of(tensor) for tensor in tensors_in(*args, *kwargs.values())}
        for tensor in written(func, args, kwargs):
            key, storage = key_of(tensor), tensor.untyped_storage()
            if key not in self._born and key not in self._saved:
                self._saved[key] = (storage, storage.clone())
        out = func(*args, **kwargs)
        self._born |= {key_of(tensor) for tensor in tensors_in(out)} - given
        return out

    def put_back(self) -> None:
        """Undo what was written to memory from before."""
        for storage, before in self._saved.values():
            storage.copy_(before)
        self._saved.clear()


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes."""
    if (
        not hasattr(func, "_schema") or not func._schema.is_mutable
    ):  # without a schema: a higher-order operation
        return []
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return tensors_in(found)


def key_of(tensor: Tensor) -> int:
    """What tells one piece of memory from another."""
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    return int(tensor.untyped_storage()._cdata)


def name_of(func: Any) -> str:
    """An operation's name without its overload."""
    packet = getattr(func, "overloadpacket", None)
    return str(func.name() if packet is None else packet.__name__)
