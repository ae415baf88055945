"""What modules hold beside parameters and buffers: lists, dicts, arrays and tensors, put back."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradsight.core.shards import local_part

PutBack = Callable[[], None]
OF_TORCH = frozenset(vars(nn.Module()))
"""Names of attributes that every module has: others keep those."""
MOST_ENTRIES = 10_000
"""A longer container gets its entries back, but what is written to them is not looked for."""


@contextmanager
def contents_kept(root: nn.Module) -> Iterator[None]:
    """What a pass adds to or writes into the attributes of modules is taken back after it."""
    held = list(_held_by(root))
    try:
        yield
    finally:
        for put_back in held:
            put_back()


def _held_by(root: nn.Module) -> Iterator[PutBack]:
    seen = {id(each) for each in (*root.parameters(), *root.buffers())}
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name not in OF_TORCH:
                yield from _held(value, seen)


def _held(value: Any, seen: set[int]) -> Iterator[PutBack]:
    """How to put back this value and all that is in it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor | np.ndarray):
        yield _kept_values(value)
        return
    if not isinstance(value, list | tuple | dict | set | deque):
        return
    if not isinstance(value, tuple):
        yield _kept_entries(value)
    if len(value) <= MOST_ENTRIES:
        for entry in list(value.values() if isinstance(value, dict) else value):
            yield from _held(entry, seen)


def _kept_values(value: Any) -> PutBack:
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: np.copyto(value, array)
    saved = value.detach().clone()

    def put_back() -> None:
        if not torch.equal(local_part(value), local_part(saved)):
            with torch.no_grad():
                value.copy_(saved)

    return put_back


def _kept_entries(value: Any) -> PutBack:
    saved = value.copy()

    def put_back() -> None:
        value.clear()
        fill = value.extend if isinstance(value, list | deque) else value.update
        fill(saved)

    return put_back
