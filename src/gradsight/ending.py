"""Something closes when the process exits or is asked to, and leaves both as they were. A forked child only lets go of it."""

import atexit
import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

_endings: "weakref.WeakSet[Ending]" = weakref.WeakSet()


class Ending:
    """Calls `close` at exit and on SIGTERM, and `let_go` in a forked child, unless cancelled before."""

    def __init__(self, close: Callable[[], None], let_go: Callable[[], None] = lambda: None) -> None:
        self._close, self._let_go = close, let_go
        in_forked_children()
        _endings.add(self)
        self._process = os.getpid()
        self._previous: Any = None
        self._installed = False
        atexit.register(self._at_exit)
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def cancel(self) -> None:
        """Put everything back; where somebody has set a handler since, theirs stays."""
        atexit.unregister(self._at_exit)
        _endings.discard(self)
        in_main = threading.current_thread() is threading.main_thread()
        if self._installed and in_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
            self._installed = False

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._close()

    def _on_signal(self, number: int, frame: Any) -> None:
        """Close, then do what would have been done without us. A forked child (a data loader's worker) only does the latter."""
        previous: Callable[..., Any] | int | None = self._previous
        if os.getpid() == self._process:
            self._close()
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@functools.cache
def in_forked_children() -> None:
    """From now on, tell forked children: they inherit all that watches their parent, and must not touch its record."""

    def forked() -> None:
        for ending in list(_endings):
            with contextlib.suppress(Exception):
                ending._let_go()

    os.register_at_fork(after_in_child=forked)
