# mypy: allow-untyped-calls
"""The line of a block that writes in place to something that it must leave as it is."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gradsight.core.random_state import randomness_kept
from gradsight.core.samples import tensors_in
from gradsight.core.shards import local_part
from gradsight.core.source import working_line
from gradsight.memory.storages import storages, written_tensors


class WriteFinder(TorchDispatchMode):
    """Finds the first line that writes to one of these tensors, by whatever name.

    `by_value`: only one that makes it another value; a clamp of what is in its range does not.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor], *, by_value: bool = False) -> None:
        super().__init__()
        self.found = False
        self.line: str | None = None
        self._by_value = by_value
        self._watched = {storage._cdata for tensor in tensors for storage in storages(tensor)}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Parts of the block that are compiled stay so, as one operator each."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = self._watched_among(func, args, kwargs)
        if not written or self.found:
            return func(*args, **kwargs)
        before = [tensor.detach().clone() for tensor in written if self._by_value]
        out = func(*args, **kwargs)
        if not before or any(map(_differs, before, written)):
            self.found = True
            self.line = working_line()
        return out

    def _watched_among(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """The watched tensors that a call writes to."""
        # One without a schema, such as flex attention, tells nothing, and may be innocent.
        if not hasattr(func, "_schema"):
            return []
        return [
            tensor
            for tensor in written_tensors(func, args, kwargs)
            if any(storage._cdata in self._watched for storage in storages(tensor))
        ]


def _differs(before: torch.Tensor, now: torch.Tensor) -> bool:
    return not torch.equal(local_part(before), local_part(now))


def line_of_write(run: Callable[..., Any], leaves: Sequence[Any]) -> str | None:
    """The line that writes to an argument, found by running the block again on copies."""
    copies = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), list(leaves))
    finder = WriteFinder(tensors_in(copies))
    try:
        with torch.no_grad(), randomness_kept(), finder:
            run(*copies)
    except Exception:
        pass  # the line is an extra: what is refused stays refused
    return finder.line
