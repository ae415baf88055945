"""What a thread is doing, known also in the threads that autograd's engine works in for it.

Python's `threading.local` would not do: on accelerators, and for passes nested deeply, the hooks of
a backward pass run in threads of the engine's. Those get torch's own thread-local objects from the
thread that called.

A thread must not end with such an object: torch would want Python for it when that is too late.
"""

from collections.abc import Callable
from typing import Any

import torch

_get = torch._C._get_obj_in_tls
_has = torch._C._is_key_in_tls
_remove: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)


def _forget(key: str) -> None:
    """Versions of torch that cannot take an object away have None instead."""
    carry(key, None)


def _has_more_than_none(key: str) -> bool:
    return _has(key) and _get(key) is not None


# Mostly torch's own functions: what stands in for torch's backward calls these unguarded.
carry = torch._C._stash_obj_in_tls
"""Keep a value under a key for this thread, and for passes of the engine's that it calls."""
drop = _forget if _remove is None else _remove
"""Keep it no more."""
is_carried = _has_more_than_none if _remove is None else _has
"""Whether there is one."""
current_task = torch._C._current_graph_task_id
"""The number of the pass that the engine runs in this thread; -1 outside of any."""


def carried(key: str) -> Any:
    """What is kept under this key; None where there is nothing."""
    return _get(key) if _has(key) else None
