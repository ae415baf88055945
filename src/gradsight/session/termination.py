"""SIGTERM while a run is recorded: all steps go into the record, then the process ends by it.

Without us nobody would have been asked. So a handler of the user's, and a signal that is ignored,
are left alone. Otherwise ours only wakes a thread: it may run between any two instructions of the
training, whatever locks are held there. The thread may wait for those locks, for a bounded time.
"""

import contextlib
import ctypes
import functools
import os
import select
import signal
import threading
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from gradsight.core.guard import Guard, lock, put_back, register_at_fork

_END = 255
"""The byte of our handler: end the process. The interpreter writes numbers of signals."""
_FLUSH = 254
"""Somebody's handler, set after ours, has called ours: write what is there, and go on."""
_STOP = 253
_FOR_THE_HANDLER = 0.5
"""Seconds that the main thread gets to run the handler; in a long call of C it never does."""
_FOR_THE_RUNS = 3.0
"""Seconds that all runs together get to finish their records."""
_LIVES_ON = 1.0
"""Seconds after which the signal has no effect: the first process of a container ignores it."""


class Recorded(Protocol):
    """A run whose steps must be in the record before the process ends."""

    def standing_still(self) -> AbstractContextManager[None]:
        """In here training makes no step, if it could be held in time."""

    def flush(self) -> None:
        """Bring all steps that were made into the record."""

    def asked_to_end(self) -> None:
        """The same, and write down how things stood."""

    def wait_for_writers(self) -> None:
        """Wait for what is written beside the training."""


class TerminationWatch:
    """A pipe, the thread that waits at its end, and the handler that writes into it."""

    def __init__(self) -> None:
        self.runs: list[Recorded] = []
        self._guard = Guard(None, "signal", "SIGTERM was not handled as it should be")
        self._reading = -1
        self._writing = -1
        self._thread: threading.Thread | None = None
        self._handler: Any = None
        self._masks = threading.local()
        self._finished = threading.Event()
        self._lives_on = threading.Event()

    # For those who open and close runs.

    def add(self, run: Recorded, guard: Guard) -> None:
        """Finish this run too when SIGTERM comes, where nobody else has a word in that."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not hasattr(signal, "pthread_sigmask"):
            return  # Windows delivers no SIGTERM: it ends a process without notice.
        with lock:
            if not self.runs:
                # Ours is still there where the last run was closed by another thread.
                if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, self._handler):
                    return
                self._start()
            self.runs.append(run)
        get = functools.partial(signal.getsignal, signal.SIGTERM)
        pair = (self._handler, signal.SIG_DFL)
        guard.at_end(self._stop_if_unused)
        put = functools.partial(signal.signal, signal.SIGTERM)
        guard.at_end(put_back, self.runs, run, get, put, pair)

    def _start(self) -> None:
        _tell_forks()
        if self._thread is None:
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            self._reading = reading
            self._writing = writing
            self._handler = functools.partial(self._guard.attempt, self._on_signal)
            self._thread = threading.Thread(
                target=functools.partial(self._guard.attempt, self._run),
                name="gradsight-sigterm",
                daemon=True,
            )
            self._thread.start()
        signal.signal(signal.SIGTERM, self._handler)
        # Written to by the interpreter's own handler at once, also where the main thread is in a
        # long call of C (a collective) and cannot run ours. Somebody else's, asyncio's, is kept.
        other = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)

    def _stop_if_unused(self) -> None:
        """Where ours could not be put back (in another thread than the main one), it stays."""
        in_main = threading.current_thread() is threading.main_thread()
        if self.runs or self._thread is None or not in_main:
            return
        self._give_wakeup_back()
        os.write(self._writing, bytes([_STOP]))
        self._thread.join(_FOR_THE_RUNS)
        self._thread = None
        self._close_pipe()

    def _give_wakeup_back(self) -> None:
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._writing):
            signal.set_wakeup_fd(current)

    def _close_pipe(self) -> None:
        reading = self._reading
        writing = self._writing
        # Not to be written to again: the numbers may soon be those of other files.
        self._reading = -1
        self._writing = -1
        os.close(reading)
        os.close(writing)

    # Forks. A signal to a child that still has our handler would write into its parent's pipe.

    def before_fork(self) -> None:
        """Hold the signal back until the child has let go."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork_in_parent(self) -> None:
        """Let it come again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def after_fork_in_child(self) -> None:
        """SIGTERM means to a child what it would have meant without us."""
        try:
            if self._thread is not None:
                self.runs.clear()
                self._thread = None
                if signal.getsignal(signal.SIGTERM) is self._handler:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._give_wakeup_back()
                self._close_pipe()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    # For the main thread, in the middle of anything.

    def _on_signal(self, number: int, frame: Any) -> None:
        """Wake the thread. No lock, no file, nothing that may wait."""
        asked = _FLUSH
        if signal.getsignal(signal.SIGTERM) is self._handler:
            asked = _END
        # It may be full, of signals that are not looked at yet: then the thread is awake. Or gone,
        # where somebody has kept our handler for later.
        with contextlib.suppress(OSError):
            os.write(self._writing, bytes([asked]))

    # For the thread.

    def _run(self) -> None:
        while True:
            asked = self._next(None)
            if asked == signal.SIGTERM and self._is_ours():
                asked = self._confirmed()
            if asked == _STOP:
                return
            if asked == _FLUSH:
                self._guard.attempt(self._flush)
            elif asked == _END:
                self._end()

    def _next(self, seconds: float | None) -> int | None:
        """The next byte; None where none comes in time."""
        pipe = select.poll()
        pipe.register(self._reading, select.POLLIN)
        if not pipe.poll(None if seconds is None else 1000 * seconds):
            return None
        return os.read(self._reading, 1)[0]

    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self._handler

    def _confirmed(self) -> int:
        """What the handler says to a SIGTERM; where it cannot run, the process is to end."""
        while True:
            asked = self._next(_FOR_THE_HANDLER)
            if asked is None:
                return _END
            if asked in (_END, _FLUSH, _STOP):
                return asked

    def _flush(self) -> None:
        for run in list(self.runs):
            with run.standing_still():
                run.flush()

    def _end(self) -> None:
        """Finish the records, then end as if nobody had been asked."""
        self._finished.clear()
        self._lives_on.clear()
        action = functools.partial(self._guard.attempt, self._finish)
        finishing = threading.Thread(target=action, name="gradsight-ending", daemon=True)
        finishing.start()
        self._finished.wait(_FOR_THE_RUNS)
        _end_by_default(signal.SIGTERM)
        # Nobody comes here but the first process of a container: it goes on, and so do we.
        self._lives_on.wait(_LIVES_ON)
        self._lives_on.set()

    def _finish(self) -> None:
        with ExitStack() as held:
            for run in list(self.runs):
                held.enter_context(run.standing_still())
            for run in list(self.runs):
                self._guard.attempt(run.asked_to_end)
            for run in list(self.runs):
                self._guard.attempt(run.wait_for_writers)
            self._finished.set()
            self._lives_on.wait()


def _end_by_default(number: int) -> None:
    """End by this signal. signal.signal() would be for the main thread alone."""
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.restype = ctypes.c_void_p
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    set_handler(number, None)
    os.kill(os.getpid(), number)


TERMINATION = TerminationWatch()


@functools.cache
def _tell_forks() -> None:
    guard = Guard(None, "fork", "a forked process may be told of its parent's signals")
    register_at_fork(
        before=functools.partial(guard.attempt, TERMINATION.before_fork),
        after_in_parent=functools.partial(guard.attempt, TERMINATION.after_fork_in_parent),
        after_in_child=functools.partial(guard.attempt, TERMINATION.after_fork_in_child),
    )
