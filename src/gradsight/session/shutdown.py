"""A run closes when the process exits or is asked to, and leaves both as they were.

A forked child only lets go of it.
"""

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

_installed: "weakref.WeakSet[ShutdownHooks]" = weakref.WeakSet()


class Closable(Protocol):
    """A run that has to be closed before the process ends."""

    def close_at_exit(self) -> None:
        """The process ends: write what is left, and wait for nobody."""

    def detach_in_child(self) -> None:
        """This process was forked from the one that is being recorded."""

    def asked_to_end(self) -> None:
        """SIGTERM has come; `close_at_exit` follows."""

    def ended_by(self, error: BaseException) -> None:
        """An exception that nobody has caught ends the process."""


class ShutdownHooks:
    """Tells a run of the process's end, unless cancelled before."""

    def __init__(self, run: Closable) -> None:
        self._run = run
        tell_forked_children()
        _installed.add(self)
        self._process = os.getpid()
        self._previous_handler: Any = None
        self._handles_signals = False
        self._previous_hook = sys.excepthook
        self._hook = self._on_exception
        # The bound method is kept: a new one is made at every access, and could not be told again.
        sys.excepthook = self._hook
        atexit.register(self._at_exit)
        # Only the main thread may set handlers; a watch in another one closes at exit.
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_signal)
            self._handles_signals = True

    def cancel(self) -> None:
        """Put everything back; where somebody has set a handler since, theirs stays."""
        atexit.unregister(self._at_exit)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        _installed.discard(self)
        in_main = threading.current_thread() is threading.main_thread()
        is_ours = signal.getsignal(signal.SIGTERM) == self._on_signal
        if self._handles_signals and in_main and is_ours:
            previous = self._previous_handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
            self._handles_signals = False

    def close_first(self) -> None:
        """Come before whatever has been registered since for the end of the process."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def detach_in_child(self) -> None:
        """This process was forked."""
        self._run.detach_in_child()

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._run.close_at_exit()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Nobody has caught it: say so, then do what would have been done without us."""
        if os.getpid() == self._process:
            self._run.ended_by(error)
        self._previous_hook(kind, error, trace)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Close, then do what would have been done without us.

        A forked child (a data loader's worker) only does the latter.
        """
        previous: Callable[..., Any] | int | None = self._previous_handler
        if os.getpid() == self._process:
            self._run.asked_to_end()
            self._run.close_at_exit()
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def close_first_at_exit() -> None:
    """Have the open runs closed before trackers that were opened since end their own."""
    for hooks in list(_installed):
        hooks.close_first()


@functools.cache
def tell_forked_children() -> None:
    """From now on, tell forked children: they inherit all that watches their parent."""

    def forked() -> None:
        for hooks in list(_installed):
            with contextlib.suppress(Exception):
                hooks.detach_in_child()

    os.register_at_fork(after_in_child=forked)
