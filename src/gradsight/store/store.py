"""Writes run.sqlite off the training thread, and loses nothing that was handed over.

The training thread appends a frame to `run.sqlite-tail`: one small write, which a kill -9 does not
undo. A thread brings the frames into the tables several times a second and empties the tail.
Whoever opens the run next brings in what a killed run left.
"""

import contextlib
import errno
import fcntl
import functools
import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradsight.core import rundir
from gradsight.core.problems import Problems
from gradsight.core.worker import WALL_CLOCK, Clock, Worker
from gradsight.errors import RunError, WrongPlace
from gradsight.store import schema
from gradsight.store import tail_format as frames
from gradsight.store.score_folder import forget_scores
from gradsight.store.scores import step_after
from gradsight.values.findings import Finding, Problem
from gradsight.values.histograms import Histogram
from gradsight.values.plain import plain
from gradsight.values.steps import Step

_PERIOD = 0.25
_PATIENCE = 10.0
"""Seconds the thread gets to finish; whoever closes the run then does the rest."""
_BACKLOG = 2**28
"""Bytes kept for a disk that does not take them, before the newest are dropped."""

_open: dict[Path, "Store"] = {}
_open_lock = threading.Lock()


@functools.cache
def _in_forked_children() -> None:
    """Have forked children let go of every open store.

    A child shares the parent's files, but has neither its thread nor a way to free its locks.
    """

    def let_go() -> None:
        global _open_lock
        _open_lock = threading.Lock()
        for store in _open.values():
            store.let_go()
        _open.clear()

    os.register_at_fork(after_in_child=let_go)


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
        make_run_dir(path)
        self._tail = _lock_tail(path)
        try:
            self._connection = _connect(path)
            recover(self._connection, self._tail)
        except BaseException:
            os.close(self._tail)
            raise
        self._number = schema.last_frame(self._connection)
        # Both can be taken again by their owner: a signal may close a watch while one is held.
        self._lock = threading.RLock()
        self._database = threading.RLock()
        self._let_go = False
        self._pending: list[frames.Frame] = []
        self._pending_bytes = 0
        self._layout_names: Sequence[str] | None = None
        self._layout_number = 0
        self._worker = Worker("gradsight-store", self._drain, _PERIOD, clock)

    # For the training thread.

    def add_step(self, step: Step, names: Sequence[str], statistics: bytes = b"") -> None:
        """One step, with what `frames.pack_statistics` made of its parameters `names`."""
        layout = self._layout(names) if statistics else 0
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

    def next_step(self) -> int:
        """The step after the last one that was recorded or scored."""
        self.flush()
        with self._database:
            last = schema.last_step(self._connection)
        return step_after(last, self.path)

    def forget_from(self, step: int) -> None:
        """Remove this step and all later ones, with their scores."""
        self.flush()
        with self._database:
            schema.forget_from(self._connection, step)
        for fault in forget_scores(self.path, step):
            self.problems.report("damaged scores", fault, step)

    def flush(self) -> None:
        """Bring everything handed over so far into the tables."""
        self._drain()

    def close(self) -> None:
        """Leave; the last one to leave closes the files."""
        with _open_lock:
            self.users -= 1
            if self.users > 0 or _open.get(self.path) is not self:
                return
            del _open[self.path]
        self._worker.stop(_PATIENCE)
        self._drain()  # what the thread did not get to, and problems of the very end
        with self._database:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            os.close(self._tail)

    def let_go(self) -> None:
        """In a forked child: drop whatever is handed over from now on."""
        self._lock = threading.RLock()
        self._database = threading.RLock()
        self._let_go = True
        self._pending = []
        self._pending_bytes = 0
        os.close(self._tail)  # the parent's lock stays: it goes with the last copy of the file

    def _layout(self, names: Sequence[str]) -> int:
        """The number of a list of names; asked for at every step, so remembered by identity."""
        if self._layout_names is not names:
            number, payload = frames.pack_layout(names)
            self._add(frames.LAYOUT, payload)
            self._layout_number = number
            self._layout_names = names
        return self._layout_number

    def _add(self, kind: int, payload: bytes) -> None:
        with self._lock:
            if self._let_go:
                return
            self._number += 1
            if self._pending_bytes > _BACKLOG:
                self.problems.report(
                    "store-full",
                    "the record cannot be written and its backlog is full: steps are being dropped",
                )
                return
            # To memory first: if the disk refuses the tail, the thread may still reach the tables.
            frame = (self._number, kind, payload)
            self._pending.append(frame)
            self._pending_bytes += len(payload)
            try:
                _append(self._tail, frames.pack(*frame))
            except OSError as error:
                self.problems.report(
                    "store-tail", f"{self.path / rundir.TAIL} cannot be written: {error}"
                )

    # For the thread.

    def _drain(self) -> None:
        with self._database:
            batch, size = self._take_pending()
            if not batch:
                return
            try:
                schema.apply(self._connection, batch)
            except sqlite3.Error as error:
                self.problems.report(
                    "store", f"{self.path / rundir.RECORD} cannot be written: {error}; trying again"
                )
                with self._lock:
                    self._pending = batch + self._pending
                    self._pending_bytes += size
                return
            with self._lock, contextlib.suppress(OSError):
                # Of frames that came meanwhile a kill would leave nothing but the tail. Those that
                # are in the tables already are known by their numbers, should they be read again.
                if not self._pending:
                    os.ftruncate(self._tail, 0)

    def _take_pending(self) -> tuple[list[frames.Frame], int]:
        """The frames to be brought in, and their bytes; those of problems last.

        A full backlog drops what is added, so problems are asked for when it has been taken out.
        """
        with self._lock:
            batch = self._pending
            size = self._pending_bytes
            self._pending = []
            self._pending_bytes = 0
            for problem in self.problems.take_changed():
                self.add_problem(problem)
            batch += self._pending
            size += self._pending_bytes
            self._pending = []
            self._pending_bytes = 0
        return batch, size


def _append(tail: int, data: bytes) -> None:
    """Append whole or not at all: a frame cut off by a full disk would hide those after it."""
    written = os.write(tail, data)
    if written < len(data):
        os.ftruncate(tail, os.fstat(tail).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def recover(connection: sqlite3.Connection, tail: int) -> None:
    """Bring what a killed run left in its tail into the tables."""
    left = frames.unpack(os.pread(tail, os.fstat(tail).st_size, 0))
    last = schema.last_frame(connection)
    schema.apply(connection, [frame for frame in left if frame[0] > last])
    os.ftruncate(tail, 0)


def make_run_dir(path: Path) -> None:
    """Make a run directory where there is none; an error where it could not be written."""
    if path.exists() and not path.is_dir():
        raise WrongPlace(
            f"run_dir {path} is a file; give a directory, or a name that does not exist yet"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongPlace(f"run_dir {path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise WrongPlace(f"run_dir {path} is not writable")


def _lock_tail(path: Path) -> int:
    try:
        tail = os.open(path / rundir.TAIL, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise WrongPlace(f"run_dir {path} is not writable: {error.strerror}") from error
    # Two processes would number their frames alike. A lock of this kind goes with its process,
    # so that a killed run can be opened again.
    try:
        fcntl.flock(tail, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(tail)
        raise WrongPlace(
            f"another process is recording into {path}; give this run a directory of its own"
        ) from error
    return tail


def _connect(path: Path) -> sqlite3.Connection:
    file = path / rundir.RECORD
    try:
        # The thread writes, and whoever closes or flushes: one at a time, under a lock of ours.
        connection = sqlite3.connect(file, check_same_thread=False, timeout=10)
        schema.create_tables(connection, file)
    except sqlite3.DatabaseError as error:
        raise RunError(
            f"{file} cannot be opened: {error}. Move it away to start this run anew"
        ) from error
    return connection
