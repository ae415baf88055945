"""The memory behind tensors, and which of its arguments an operator writes to."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor; of a wrapper such as a DTensor those of its parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh among them
                yield from storages(part)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()


def tensors_among(value: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an operator writes to, as its schema says.

    >>> x = torch.ones(2)
    >>> [t is x for t in written_tensors(torch.ops.aten.add_.Tensor, (x, torch.ones(2)), {})]
    [True]
    """
    written = _written_arguments(func)
    if written is None:  # an operator that tells nothing of itself may write to anything
        return tensors_among((args, kwargs))
    found: list[torch.Tensor] = []
    for position, name in written:
        if position < len(args):
            found += tensors_among(args[position])
        elif name in kwargs:
            found += tensors_among(kwargs[name])
    return found


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...] | None:
    """Positions and names of the arguments that an operator writes to; None: nobody knows."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def makes_no_view(func: Any) -> bool:
    """Whether an operator's schema says that its results share no memory with its arguments."""
    schema = getattr(func, "_schema", None)
    return schema is None or all(argument.alias_info is None for argument in schema.arguments)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count."""
    if tensor.is_inference():
        return None
    return tensor._version
