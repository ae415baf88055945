"""Operations that change their first argument, and what they are without that."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from gradsight.ghost.derivative import function_name

IN_PLACE_OPERATORS = frozenset(
    {
        "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__",
        "__ipow__",
    }
)  # fmt: skip


@lru_cache(maxsize=4096)
def changes_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument, by torch's naming."""
    name = function_name(func)
    if name.startswith("__"):
        return name in IN_PLACE_OPERATORS
    return name.endswith("_") and not name.endswith("__")


def out_of_place(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that returns what this one changes its first argument to; None: none is known.

    >>> out_of_place(Tensor.add_) is Tensor.add, out_of_place(Tensor.__iadd__) is Tensor.__add__
    (True, True)
    """
    name = function_name(func)
    if name.startswith("__i"):
        return getattr(Tensor, f"__{name[3:]}", None)
    return getattr(Tensor, name.rstrip("_"), None)


def first_changed(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one that returns a changed copy of its first argument."""

    def changed(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = first.clone()
        func(copy, *args, **kwargs)
        return copy

    changed.__name__ = f"{function_name(func)} (in place)"
    return changed
