"""Locks under which no signal closes a run: what it asks for waits until they are free. No torch.

A signal is handled in the middle of whatever the main thread does. Were a run closed there while
that thread holds a lock, the thread that is to write the rest would wait for the lock for ever, and
the closing for that thread.
"""

import _thread
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

_locks: "weakref.WeakSet[HeldBriefly]" = weakref.WeakSet()
_waiting: list[Callable[[], None]] = []


# C has it open to children, and its owner is all that is asked of it; stubs say otherwise.
class HeldBriefly(_thread.RLock):  # type: ignore[misc]
    """A lock for work that ends soon and waits for nobody; its owner may take it again."""

    def __init__(self) -> None:
        super().__init__()
        _locks.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        # A signal before the release has left its wish here; one after it finds the lock free.
        if _waiting and threading.current_thread() is threading.main_thread():
            _do_what_waits()


def when_free(action: Callable[[], None]) -> None:
    """Do it now or, where this thread holds such a lock, as soon as it holds none.

    For handlers of signals, which run in the main thread.
    """
    _waiting.append(action)
    _do_what_waits()


def _do_what_waits() -> None:
    while _waiting and not any(map(_is_held_here, list(_locks))):
        _waiting.pop(0)()


def _is_held_here(lock: HeldBriefly) -> bool:
    """Whether this thread holds it; threading.Condition asks its locks the same."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]
