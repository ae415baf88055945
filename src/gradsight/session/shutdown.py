"""A run is told how its process ends, and leaves the process as it was.

A forked child only lets go of it.
"""

import atexit
import functools
import os
import sys
import threading
from _sitebuiltins import Quitter
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol

from gradsight.core.guard import Guard, lock, put_back, register_at_fork

_open: list["ShutdownHooks"] = []
_excepthook: list[tuple[Any, Any]] = []
"""Ours and the original, while a run is open."""
_EXIT_FUNCTIONS: tuple[tuple[Any, str], ...] = ((sys, "exit"), (Quitter, "__call__"))
"""The functions that a script calls to exit."""
_exits: list[tuple[Any, Any]] = []
"""Gradsight's replacement and the original of each exit function, while a run is open."""


class Closable(Protocol):
    """A run that has to be closed before the process ends."""

    def close_at_exit(self) -> None:
        """The process ends: write what is left, and wait for nobody."""

    def detach_in_child(self) -> None:
        """This process was forked from the one that is being recorded."""

    def ended_by(self, error: BaseException) -> None:
        """An exception that nobody has caught ends the process."""

    def given_up(self, frame: FrameType) -> None:
        """Handle a call of sys.exit(), exit() or quit() with an error status."""


class ShutdownHooks:
    """Tells a run of the process's end until its guard is closed."""

    def __init__(self, run: Closable, guard: Guard) -> None:
        self._run = run
        self.guard = guard
        self._process = os.getpid()
        tell_forked_children()
        # Kept: a new one would be made at every access, and could not be unregistered.
        self._exit = functools.partial(guard.attempt, self._at_exit)
        with lock:
            if not _open:
                _replace_excepthook()
                _replace_exits()
            _open.append(self)
        get = functools.partial(getattr, sys, "excepthook")
        put = functools.partial(setattr, sys, "excepthook")
        guard.at_end(put_back, _open, self, get, put, _excepthook[0])
        for (owner, name), pair in zip(_EXIT_FUNCTIONS, _exits, strict=True):
            get = functools.partial(getattr, owner, name)
            put = functools.partial(setattr, owner, name)
            guard.at_end(put_back, _open, self, get, put, pair)
        atexit.register(self._exit)
        guard.at_end(atexit.unregister, self._exit)

    def close_first(self) -> None:
        """Come before whatever has been registered since for the end of the process."""
        atexit.unregister(self._exit)
        atexit.register(self._exit)

    def detach_in_child(self) -> None:
        """This process was forked."""
        self.guard.attempt(self._run.detach_in_child)

    def ended_by(self, error: BaseException) -> None:
        """Nobody has caught it."""
        if os.getpid() == self._process:
            self._run.ended_by(error)

    def given_up(self, frame: FrameType) -> None:
        """Pass on that the script exits with an error status."""
        if os.getpid() == self._process:
            self._run.given_up(frame)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._run.close_at_exit()


def close_first_at_exit() -> None:
    """Have the open runs closed before trackers that were opened since end their own."""
    for hooks in _open:
        hooks.close_first()


def _replace_excepthook() -> None:
    original: Callable[..., Any] = sys.excepthook

    def ours(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell every open run, then do what would have been done without us."""
        try:
            for hooks in _open:
                hooks.guard.attempt(hooks.ended_by, error)
        finally:
            original(kind, error, trace)

    sys.excepthook = ours
    _excepthook[:] = [(ours, original)]


def _replace_exits() -> None:
    """Replace sys.exit(), exit() and quit(), because they do not call the excepthook."""
    _exits[:] = [_replaced(owner, name) for owner, name in _EXIT_FUNCTIONS]


def _replaced(owner: Any, name: str) -> tuple[Any, Any]:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def ours(*given: Any, **named: Any) -> Any:
        """Notify every open run if the status is an error, then call the original function."""
        status = named.get("code", given[-1] if given else None)
        is_fine = status is None or (isinstance(status, int) and status == 0)
        is_fine = is_fine or isinstance(status, Quitter)  # exit() without a status
        # In another thread, it ends that thread only.
        if not is_fine and threading.current_thread() is threading.main_thread():
            frame = sys._getframe(1)
            for hooks in _open:
                hooks.guard.attempt(hooks.given_up, frame)
        return original(*given, **named)

    setattr(owner, name, ours)
    return ours, original


@functools.cache
def tell_forked_children() -> None:
    """From now on, tell forked children: they inherit all that watches their parent."""

    def forked() -> None:
        for hooks in _open:
            hooks.detach_in_child()

    guard = Guard(None, "fork", "a forked process has not let go of its parent's run")
    register_at_fork(after_in_child=functools.partial(guard.attempt, forked))
