"""Something closes when the process exits or is asked to, and leaves both as they were. A forked
child only lets go of it.
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
from typing import Any

_endings: "weakref.WeakSet[Ending]" = weakref.WeakSet()


class Ending:
    """Calls `close` at exit and on SIGTERM, and `let_go` in a forked child, unless cancelled
    before.

    `asked` hears of SIGTERM first, `failed` of an exception that nobody has caught.
    """

    def __init__(
        self,
        close: Callable[[], None],
        let_go: Callable[[], None] = lambda: None,
        asked: Callable[[], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._close, self._let_go, self._asked, self._failed = close, let_go, asked, failed
        in_forked_children()
        _endings.add(self)
        self._process = os.getpid()
        self._previous: Any = None
        self._installed = False
        self._previous_hook = sys.excepthook
        self._hook = self._on_exception
        if failed is not None:
            sys.excepthook = self._hook
        atexit.register(self._at_exit)
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def cancel(self) -> None:
        """Put everything back; where somebody has set a handler since, theirs stays."""
        atexit.unregister(self._at_exit)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        _endings.discard(self)
        in_main = threading.current_thread() is threading.main_thread()
        if self._installed and in_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(
                signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous
            )
            self._installed = False

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self._close()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Nobody has caught it: say so, then do what would have been done without us."""
        if self._failed is not None and os.getpid() == self._process:
            self._failed(error)
        self._previous_hook(kind, error, trace)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Close, then do what would have been done without us. A forked child (a data loader's
        worker) only does the latter.
        """
        previous: Callable[..., Any] | int | None = self._previous
        if os.getpid() == self._process:
            if self._asked is not None:
                self._asked()
            self._close()
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@functools.cache
def in_forked_children() -> None:
    """From now on, tell forked children: they inherit all that watches their parent, and must not
    touch its record.
    """

    def forked() -> None:
        for ending in list(_endings):
            with contextlib.suppress(Exception):
                ending._let_go()

    os.register_at_fork(after_in_child=forked)
