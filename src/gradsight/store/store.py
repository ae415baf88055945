"""Writes a run's record off the training thread, and loses nothing that was handed over.

The training thread appends a frame to `run.sqlite-tail`: one small write, which a kill -9 does not
undo. Now and then, and at the end, a thread publishes a record that has these frames in its tables,
and begins a new tail. Readers read both; nothing has to be put in order after a kill.

Locks, always taken in this order: `_open_lock`, `_tending` (whoever publishes, flushes or closes),
`_lock` (the tail and what waits to be written to it), then those of `Problems`. The training thread
takes `_lock` alone, and only for as long as a write takes. It is one that its owner may take again:
a signal's handler of the user's runs in the middle of anything, and may log to the watch.
"""

import contextlib
import errno
import functools
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradsight.core import limits, rundir
from gradsight.core.files import remove_abandoned
from gradsight.core.guard import Guard, register_at_fork
from gradsight.core.problems import Problems
from gradsight.core.worker import WALL_CLOCK, Clock, Worker
from gradsight.errors import GradsightError, RunError, WrongPlace
from gradsight.store import publishing, schema
from gradsight.store import tail_format as frames
from gradsight.store.record_file import UNREADABLE, connect
from gradsight.store.record_view import RecordView
from gradsight.store.run_files import write_config
from gradsight.store.score_folder import forget_scores
from gradsight.store.scores import step_after
from gradsight.store.tail_writer import TailWriter
from gradsight.values.findings import Finding, Problem
from gradsight.values.histograms import Histogram
from gradsight.values.measured import Floats
from gradsight.values.plain import plain
from gradsight.values.steps import Step

_PERIOD = 0.25
_PATIENCE = 10.0
"""Seconds the thread gets to finish; whoever closes the run then does the rest."""
_BACKLOG = 2**28
"""Bytes kept for a disk that does not take them, before the newest are dropped."""
_SMALL = 2**22
_USUAL = 2**25
_LARGE = 2**28
"""A tail of so many bytes is published: at first a small one, so that little is left to the end;
then one as large as the record, so that all copying together is as much as the record again; of
very large records an eighth."""
_MANY = limits.TAIL_FRAMES // 10
"""Frames of a tail that is published, however short they are: readers take in one by one."""
_QUICK = 2**27
"""Bytes of record and tail that are published at the end, while somebody waits."""
_LOOKS = 8
"""Every so many periods the thread looks whether the run directory is still there."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_open: dict[Path, "Store"] = {}
_open_lock = threading.RLock()


@functools.cache
def _in_forked_children() -> None:
    """Have forked children let go of every open store.

    A child shares the parent's files, but has neither its thread nor a way to free its locks.
    """

    def let_go() -> None:
        global _open_lock
        _open_lock = threading.RLock()
        for store in _open.values():
            store.let_go()
        _open.clear()

    guard = Guard(None, "fork", "a forked process has not let go of its parent's record")
    register_at_fork(after_in_child=functools.partial(guard.attempt, let_go))


def open_store(run_dir: str | os.PathLike[str], clock: Clock = WALL_CLOCK) -> "Store":
    """The store of a run directory; all who open it in one process share it, and each closes it."""
    _in_forked_children()
    path = Path(run_dir).resolve()
    with _open_lock:
        store = _open.get(path)
        if store is None:
            store = _open[path] = Store(path, clock)
        store.users += 1
        return store


class Store:
    """The record of one run, open for writing. Use `open_store`."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.users = 0
        self.recording = False
        """Whether a watch counts the steps of this run."""
        self.problems = Problems()
        """The faults of this run, for all who have it open; the thread brings them in."""
        self._lock = threading.RLock()
        self._tending = threading.RLock()
        self._tail: TailWriter | None = None
        self._folder: os.stat_result | None = None
        self._let_go = False
        """Nothing is taken any more: this is a forked child, or the run directory is gone."""
        self._is_moved = False
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._published = 0
        """The number of the last frame that the record has."""
        self._publish_at = _SMALL
        """Bytes of the tail at which the record is published."""
        self._most: int | None = None
        """Bytes that record and tail may take together; None has no limit."""
        self._config: Mapping[str, object] | None = None
        """What could not be written yet."""
        self._last_added = -1
        self._layout_names: Sequence[str] | None = None
        self._layout_number = 0
        self._looks = 0
        self._open_or_wait()
        self._worker = Worker("gradsight-store", self._tend, _PERIOD, clock)

    # For the training thread.

    def add_step(self, step: Step, names: Sequence[str], statistics: bytes = b"") -> None:
        """One step, with what `frames.pack_statistics` made of its parameters `names`."""
        layout = self._layout(names) if statistics else 0
        self._last_added = step.step
        self._add(frames.STEP, frames.pack_step(step, layout, statistics))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step by name."""
        self._add(frames.SCALARS, frames.pack_scalars(step, values))

    def add_tracked(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars by name, under a tracker's own count."""
        self._add(frames.TRACKED, frames.pack_scalars(step, values))

    def add_step_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of an optimizer step, before or after the step; loss and lr become its own."""
        self._add(frames.STEP_SCALARS, frames.pack_scalars(step, values))

    def add_histograms(self, step: int, histograms: Sequence[Histogram], source: str = "") -> None:
        """All histograms of a step from one source."""
        self._add(frames.HISTOGRAMS, frames.pack_histograms(step, source, histograms))

    def add_experts(self, step: int, norms: Mapping[str, Floats]) -> None:
        """The norms of experts at a step, by the name of their group."""
        self._add(frames.EXPERTS, frames.pack_experts(step, norms))

    def add_record(self, kind: str, key: str, step: int, value: Mapping[str, object]) -> None:
        """Anything rare; one with the same kind and key is replaced."""
        self._add(frames.RECORD, frames.pack_record(kind, key, step, value))

    def add_problem(self, problem: Problem) -> None:
        """A fault of ours that training survived."""
        self.add_record("problem", problem.key, max(0, problem.first_step), plain(problem))

    def add_finding(self, finding: Finding) -> None:
        """A judged fact; added again with more parameters or evidence, it replaces the earlier."""
        key = f"{finding.code}:{finding.first_step}"
        self.add_record("finding", key, finding.first_step, plain(finding))

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write config.json; on a full disk, as soon as there is room."""
        with self._tending:
            self._config = config
            self._write_config()

    def limit(self, most: int | None) -> None:
        """Let the record and its tail take about so many bytes: old steps are put together."""
        with self._tending:
            self._most = most
            self._publish_at = min(self._publish_at, self._next_size())

    def next_step(self) -> int:
        """The step after the last one that was recorded or scored."""
        self.flush()
        last = self._last_added
        if self._tail is not None:
            view = RecordView(self.path)
            last = max(last, -1 if (found := view.last_step()) is None else found)
            view.close()
        return step_after(last, self.path)

    def forget_from(self, step: int) -> None:
        """Remove this step and all later ones, with their scores."""
        self._add(frames.FORGET, frames.pack_forget(step))
        self._last_added = min(self._last_added, step - 1)
        for fault in forget_scores(self.path, step):
            self.problems.report("damaged scores", fault, step)

    def flush(self) -> None:
        """Bring everything handed over so far, problems too, to where readers see it."""
        with self._tending:
            self._write_all()

    def close(self, publish: bool = True) -> None:
        """Leave; the last one to leave publishes the record and closes the files.

        publish: False leaves what was added in the tail: a record is not copied for a single fault.
        """
        with _open_lock:
            self.users -= 1
            if self.users > 0 or _open.get(self.path) is not self:
                return
            del _open[self.path]
        try:
            self._worker.stop(_PATIENCE)
            # A thread that hangs in a file system that does not answer has it; all that can be done
            # then is written already.
            if self._tending.acquire(timeout=_PATIENCE):
                try:
                    self._finish(publish)
                finally:
                    self._tending.release()
        finally:
            # A thread that did not end must not write to what may soon be another file.
            self._worker.end.set()
            self._let_go = True
            self._close_tail()

    def let_go(self) -> None:
        """In a forked child: drop whatever is handed over from now on."""
        self._lock = threading.RLock()
        self._tending = threading.RLock()
        self._drop()
        if self._tail is not None:
            os.close(self._tail.handle)  # not unlocked: the lock is the parent's

    def _layout(self, names: Sequence[str]) -> int:
        """The number of a list of names; asked for at every step, so remembered by identity."""
        if self._layout_names is not names:
            number, payload = frames.pack_layout(names)
            self._add(frames.LAYOUT, payload)
            self._layout_number = number
            self._layout_names = names
        return self._layout_number

    def _add(self, kind: int, payload: bytes) -> None:
        if self._let_go:
            return
        error = None
        with self._lock:
            is_full = self._waiting_bytes > _BACKLOG
            if not is_full:
                self._waiting.append((kind, payload))
                self._waiting_bytes += len(payload)
                error = self._write_waiting()
        # Said outside of the lock: a warning may run code of the user's.
        if is_full:
            self.problems.report(
                "store-full",
                "the record cannot be written and its backlog is full: steps are being dropped",
            )
        if error is not None:
            self.problems.report("store-tail", self._cannot_write(rundir.TAIL, error))

    def _write_waiting(self) -> OSError | None:
        """Append what waits to the tail; what stood in the way. Holds `_lock`."""
        # A signal's handler that logs in the middle of this leaves it to the loop that it stopped.
        if self._is_writing or self._tail is None:
            return None
        self._is_writing = True
        try:
            while self._waiting:
                kind, payload = self._waiting[0]
                self._tail.append(kind, payload)
                self._waiting.popleft()
                self._waiting_bytes -= len(payload)
        except OSError as error:
            return error
        finally:
            self._is_writing = False
        return None

    # For the thread.

    def _tend(self) -> None:
        """Everything that is due now and then."""
        with self._tending:
            if self._let_go:
                return
            try:
                self._tend_files()
            except GradsightError as error:
                # A directory that somebody else has taken before there was room for us.
                self.problems.report("store-opening", f"nothing is recorded: {error}")

    def _tend_files(self) -> None:
        if self._tail is None:
            self._open_or_wait()
        self._looks += 1
        if self._looks % _LOOKS == 0:
            self._look_for_directory()
        self._write_all()
        self._write_config()
        if self._tail is not None and self._tail.is_due(self._publish_at, _MANY):
            self._publish()

    def _write_all(self) -> None:
        if self._let_go:
            return
        for problem in self.problems.take_changed():
            self.add_problem(problem)
        with self._lock:
            error = self._write_waiting()
        if error is not None:
            self.problems.report("store-tail", self._cannot_write(rundir.TAIL, error))

    def _open_or_wait(self) -> None:
        """Open the files; on a full disk, what comes is kept in memory and this is tried again."""
        try:
            self._open_files()
        except (OSError, RunError) as error:
            if not _is_full(error):
                if isinstance(error, RunError):
                    raise
                raise WrongPlace(f"run_dir {self.path} cannot be used: {error}") from error
            self.problems.report(
                "store-opening",
                f"{self.path} cannot be written yet: {error}. "
                "Training goes on; it is recorded as soon as there is room",
            )

    def _open_files(self) -> None:
        rundir.make_run_dir(self.path)
        tail = TailWriter(self.path)
        try:
            self._published = self._prepare(tail)
        except BaseException:
            tail.close()
            raise
        self._folder = self.path.stat()
        self._tail = tail
        if not tail.is_locked:
            self.problems.report(
                "store-lock",
                f"{self.path} lies on a file system without locks: take care that "
                "no other process records into it",
            )

    def _prepare(self, tail: TailWriter) -> int:
        """Put record and tail in order; the number of the record's last frame."""
        file = self.path / rundir.RECORD
        remove_abandoned(self.path, rundir.RECORD, rundir.TAIL, rundir.CONFIG)
        if not os.path.lexists(file):
            publishing.create_record(self.path)
            os.ftruncate(tail.handle, 0)
        try:
            connection, _ = connect(self.path)
            schema.check_tables(connection, file)
            meta = schema.read_meta(connection)
            connection.close()
            tail.continue_from(meta["run"], meta["last_frame"])
        except WrongPlace:
            raise
        except (RunError, *UNREADABLE) as error:
            raise RunError(
                f"{file} cannot be opened: {error}. Move it away to start this run anew"
            ) from error
        last: int = meta["last_frame"]
        return last

    def _publish(self) -> None:
        """Publish a record with what the tail has so far, and begin a new tail."""
        tail = self._tail
        if tail is None or self._is_moved or self._let_go or tail.at[1] == self._published:
            return
        try:
            brought_in = tail.at
            self._publish_record(tail, brought_in[1])
            self._published = brought_in[1]
            with self._lock:
                tail.begin_anew(brought_in)
            self._publish_at = self._next_size()
        except (OSError, sqlite3.Error, RunError) as error:
            # Everything is in the tail, and readers read that.
            self._publish_at = tail.at[0] + _SMALL
            self.problems.report("store", self._cannot_write(rundir.RECORD, error))

    def _publish_record(self, tail: TailWriter, last: int) -> None:
        if self._most is None:
            publishing.publish(self.path, tail.reader(), last)
            return
        # Some room is left for the tail, and some to grow before it is done again.
        most = self._most * 5 // 8
        if self._record_bytes() + tail.at[0] <= self._most * 7 // 8:
            most = self._most
        publishing.publish(self.path, tail.reader(), last, most)

    def _next_size(self) -> int:
        """Bytes of the tail at which the record is published next."""
        size = self._record_bytes()
        usual = min(max(_SMALL, min(size, _USUAL), size // 8), _LARGE)
        return usual if self._most is None else min(usual, self._most // 8)

    def _finish(self, publish: bool) -> None:
        """Write what is left, and close the files."""
        with contextlib.suppress(GradsightError):  # said by the thread already
            self._look_for_directory()
            self._tend_files()
        if publish and self._is_quick_to_publish():
            self._publish()
            self._write_all()  # the problems of publishing
        if self._waiting:
            self.problems.report(
                "store-lost",
                f"{self.path}: the last {len(self._waiting)} entries of the record "
                "could not be written, and are lost",
            )
        self._close_tail()

    def _close_tail(self) -> None:
        """Take nothing more, and let others write. Again: does nothing."""
        with self._lock:
            self._drop()
            tail = self._tail
            self._tail = None
            if tail is not None:
                tail.close()

    def _is_quick_to_publish(self) -> bool:
        """Whether nobody has to wait long; the tail of a very large run stays beside its record."""
        tail = self._tail
        return tail is not None and self._record_bytes() + tail.at[0] <= _QUICK

    def _record_bytes(self) -> int:
        try:
            return (self.path / rundir.RECORD).stat().st_size
        except OSError:
            return 0

    def _look_for_directory(self) -> None:
        """Say so where the run directory was removed or replaced; then nothing more is kept."""
        if self._tail is None or self._folder is None or self._let_go:
            return
        try:
            is_here = os.path.samestat(self.path.stat(), self._folder)
        except (FileNotFoundError, NotADirectoryError):
            is_here = False
        except OSError:
            return  # a network that does not answer is no directory that is gone
        is_kept = os.fstat(self._tail.handle).st_nlink > 0
        self._is_moved = not is_here
        if is_here and is_kept:
            return
        if is_kept:
            self.problems.report(
                "store-place",
                f"the run directory {self.path} was moved or replaced while it was "
                f"written: what follows is kept in the {rundir.TAIL} that was moved with it",
            )
            return
        self.problems.report(
            "store-place",
            f"the run directory {self.path}, or the {rundir.TAIL} in it, was removed "
            "while it was written: what was recorded is lost, and nothing more is recorded",
        )
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._let_go = True
        self._waiting = deque()
        self._waiting_bytes = 0

    def _write_config(self) -> None:
        """Write config.json, if there is one that waits."""
        if self._config is None or self._tail is None or self._is_moved or self._let_go:
            return
        try:
            write_config(self.path, self._config)
            self._config = None
        except OSError as error:
            if not _is_full(error):
                raise WrongPlace(f"run_dir {self.path} is not writable: {error}") from error
            self.problems.report("store-config", self._cannot_write(rundir.CONFIG, error))

    def _cannot_write(self, name: str, error: Exception) -> str:
        return f"{self.path / name} cannot be written: {error}; trying again"


def _is_full(error: Exception) -> bool:
    """Whether there was no room, or no more of it for this user."""
    for each in (error, error.__cause__):
        if isinstance(each, OSError) and each.errno in _FULL:
            return True
        if getattr(each, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return True
    return False
