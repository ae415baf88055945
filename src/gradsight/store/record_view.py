"""A run's record with its tail laid over it, as rows that were checked. No torch.

The tail is opened first, and the record after it. The writer publishes the record first, and begins
a new tail after it, so that whatever a tail no longer holds is in the record that is found then: no
frame is missing between them. One that both hold is known by its number.
"""

import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradsight.core import limits, rundir
from gradsight.core.places import open_file
from gradsight.errors import RunError
from gradsight.store import schema
from gradsight.store import tail_format as frames
from gradsight.store.record_file import UNREADABLE, connect
from gradsight.store.tail_file import Frame, TailReader

Row = tuple[Any, ...]
_NEVER = limits.NUMBER
"""A step that no run reaches: nothing is forgotten."""
_WRITING = 0.05
"""Seconds in which a frame that is being written is whole."""
_NUMBER = (float, str, type(None))
"""SQLite keeps no NaN: that is the text 'nan'."""
_TYPES: dict[str, tuple[tuple[type, ...], ...]] = {
    "layouts": ((int,), (str,)),
    "steps": ((int,), *[_NUMBER] * 6, (int, type(None)), (str, type(None))),
    "stats": ((int,), (int,), (bytes,)),
    "histograms": ((int,), (str,), (bytes,)),
    "scalars": ((int,), (str,), _NUMBER),
    "tracked": ((int,), (str,), _NUMBER),
    "records": ((str,), (str,), (int,), (str,)),
    "experts": ((int,), (str,), (bytes,)),
}
"""What the columns of each table may hold."""


_MOST_ROWS = {
    "layouts": limits.RECORDS,
    "steps": limits.STEPS,
    "stats": limits.STEPS,
    "histograms": limits.STEPS,
    "scalars": limits.SCALARS,
    "tracked": limits.SCALARS,
    "records": limits.RECORDS,
    "experts": limits.SCALARS,
}
"""How many rows of each table are read."""


class RecordView:
    """The rows of a run as it was when this was made, and of what its tail has got since.

    It never writes, and needs no leave to. When the record is published anew, make another one.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / rundir.RECORD
        self._tail_file = run_dir / rundir.TAIL
        self._forgotten = _NEVER
        """The step from which on the record's rows no longer count."""
        self._tail: int | None = None
        self._frames = 0
        """Frames of the tail that were taken in."""
        # A server answers several readers at once.
        self._lock = threading.Lock()
        try:
            self._tail = self._open_tail(run_dir)
            published, identity = connect(run_dir)
            self._published = published
            self._identity = identity
            schema.check_tables(self._published, self._file)
            self.meta = schema.read_meta(self._published)
            self._recent = sqlite3.connect(":memory:", check_same_thread=False)
            schema.create_tables(self._recent, 0)
            self._reader = self._begin_tail()
            self.read_tail()
        except UNREADABLE as error:
            self.close()
            raise self._damaged(error) from error
        except BaseException:
            self.close()
            raise

    def is_replaced(self) -> bool:
        """Whether the record was published anew, or a new tail begun, since this was made."""
        try:
            record = os.lstat(self._file)
            if not os.path.samestat(record, self._identity):
                return True
            if self._tail is None:
                return self._tail_file.exists()
            return not os.path.samestat(os.lstat(self._tail_file), os.fstat(self._tail))
        except OSError:
            # The run directory is gone: what was opened can still be read.
            return False

    def read_tail(self) -> bool:
        """Take in what was appended to the tail meanwhile; tell whether there was anything."""
        with self._lock:
            if self._reader is None:
                return False
            before = self._reader.position
            if self._apply_tail(self._reader) is not None:
                # On some file systems the end of a frame that is just being written is seen late.
                time.sleep(_WRITING)
                trouble = self._apply_tail(self._reader)
                if trouble is not None:
                    raise trouble
            return self._reader.position > before

    def _apply_tail(self, reader: TailReader) -> RunError | None:
        """Bring in the good frames from here on; what is wrong with the one after them."""
        trouble: RunError | None = None

        def good_frames() -> Iterator[Frame]:
            nonlocal trouble
            try:
                yield from self._new_frames(reader)
            except RunError as error:
                trouble = error

        try:
            schema.apply(self._recent, good_frames())
        except UNREADABLE as error:
            raise self._damaged(error) from error
        return trouble

    def has_torn_tail(self) -> bool:
        """Whether the tail ends inside of a frame."""
        return self._reader is not None and self._reader.is_torn()

    def rows(self, table: str, after: int = -1) -> Iterator[Row]:
        """All rows of a table in the order of its key; those of the tail replace the record's.

        after: only those of steps after this one, where the table has steps.
        """
        where = ""
        values: tuple[int, ...] = ()
        if after >= 0:
            where = "step > ?"
            values = (after,)
        older = self._published_rows(table, where, values)
        newer = self._rows_of(self._recent, table, where, values)
        return _merged(table, older, newer)

    def rows_at(self, table: str, step: int) -> Iterator[Row]:
        """The rows of one step, those of the tail in the place of the record's."""
        older = self._published_rows(table, "step = ?", (step,))
        newer = self._rows_of(self._recent, table, "step = ?", (step,))
        return _merged(table, older, newer)

    def steps_in(self, table: str, where: str = "TRUE") -> list[int]:
        """The steps that a table has rows for, without reading these."""
        query = f"SELECT DISTINCT step FROM {table} WHERE {where}"
        forgotten = schema.TABLES[table].forgotten
        self._published.patience.renew()
        try:
            found = set(self._recent.execute(query))
            if self._forgotten < _NEVER and forgotten:
                query = f"{query} AND NOT ({forgotten})"
                found |= set(self._published.execute(query, (self._forgotten,)))
            else:
                found |= set(self._published.execute(query))
        except UNREADABLE as error:
            raise self._damaged(error) from error
        return sorted(step for (step,) in found if type(step) is int)

    def records(self, kind: str) -> list[Row]:
        """Key, step and value of every record of a kind, in the order of steps."""
        found: dict[str, Row] = {}
        size = 0
        for rows in (
            self._published_rows("records", "kind = ?", (kind,)),
            self._rows_of(self._recent, "records", "kind = ?", (kind,)),
        ):
            for _, key, step, value in rows:
                found[key] = (key, step, value)
                size += len(value)
                if size > limits.RECORD_TEXT_BYTES:
                    raise RunError(f"{self._file} has more {kind}s than can be read")
        return sorted(found.values(), key=lambda row: (row[1], row[0]))

    def last_step(self) -> int | None:
        """The last step that was made."""
        self._published.patience.renew()
        try:
            found = [
                schema.last_step(self._published, self._forgotten),
                schema.last_step(self._recent, _NEVER),
            ]
        except UNREADABLE as error:
            raise self._damaged(error) from error
        return max((step for step in found if type(step) is int), default=None)

    def close(self) -> None:
        """Close the files; again does nothing."""
        for name in ("_published", "_recent"):
            connection = getattr(self, name, None)
            if connection is not None:
                connection.close()
        if self._tail is not None:
            os.close(self._tail)
            self._tail = None
            self._reader = None

    def __del__(self) -> None:
        # One that was replaced stays open as long as somebody reads rows of it. When the
        # interpreter ends, modules may be gone before it; the system closes files then.
        if os is not None:
            self.close()

    def _open_tail(self, run_dir: Path) -> int | None:
        try:
            tail = open_file(run_dir, rundir.TAIL)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(f"{self._tail_file} cannot be read: {error.strerror}") from error
        size = os.fstat(tail).st_size
        if size > limits.TAIL_BYTES:
            os.close(tail)
            raise RunError(f"{self._tail_file} has {size} bytes: more than can be read")
        return tail

    def _begin_tail(self) -> TailReader | None:
        """The tail at its beginning, if it belongs to the record."""
        if self._tail is None:
            return None
        reader = TailReader(self._tail, str(self._tail_file))
        if reader.run is not None and reader.run != self.meta.get("run"):
            raise RunError(f"{self._tail_file} is the tail of another run than {self._file}")
        if reader.first is not None and reader.first > self.meta["last_frame"] + 1:
            missing = f"{self.meta['last_frame'] + 1} to {reader.first - 1}"
            raise RunError(
                f"{self._file} is damaged: frames {missing}, between it and its tail, are missing"
            )
        return reader

    def _new_frames(self, reader: TailReader) -> Iterator[Frame]:
        for number, kind, payload in reader.frames():
            if number > self.meta["last_frame"]:
                yield number, kind, payload
                self._frames += 1
                if self._frames > limits.TAIL_FRAMES:
                    raise RunError(f"{self._tail_file} has more frames than can be read")
                if kind == frames.FORGET:
                    self._forgotten = min(self._forgotten, frames.unpack_forget(payload))

    def _published_rows(self, table: str, where: str, values: Row) -> Iterator[Row]:
        patience = self._published.patience
        patience.renew()
        if not self._has(self._published, table):
            return
        forgotten = schema.TABLES[table].forgotten
        if self._forgotten < _NEVER and forgotten:
            where = " AND ".join(filter(None, [where, f"NOT ({forgotten})"]))
            values = (*values, self._forgotten)
        for row in self._rows_of(self._published, table, where, values):
            patience.renew()
            yield row

    def _has(self, connection: sqlite3.Connection, table: str) -> bool:
        return not schema.TABLES[table].may_lack or schema.has_table(connection, table)

    def _rows_of(
        self, connection: sqlite3.Connection, table: str, where: str, values: Row
    ) -> Iterator[Row]:
        """Rows of the right types, in strictly rising order and of no more bytes than the file."""
        if not self._has(connection, table):
            return
        form = schema.TABLES[table]
        query = f"SELECT {', '.join(form.columns)} FROM {table}"
        if where:
            query += f" WHERE {where}"
        query += f" ORDER BY {', '.join(form.key)}"
        key_size = len(form.key)
        # Most rows hold the same types, and what was checked once needs no second look.
        known: dict[tuple[type, ...], bool] = {}
        # Pages that a crafted file uses for many rows would give more than it holds.
        room = self._identity.st_size + limits.TAIL_BYTES
        last: Row = ()
        left = _MOST_ROWS[table]
        try:
            for row in connection.execute(query, values):
                types = tuple(map(type, row))
                if types not in known:
                    known[types] = self._has_nan(table, row)
                if known[types]:
                    row = self._with_nan(table, row)
                key = row[:key_size]
                if not last < key:
                    raise self._malformed(f"the rows of {table} are not in order")
                last = key
                left -= 1
                if left < 0:
                    most = _MOST_ROWS[table]
                    raise RunError(f"{self._file} has more than {most} rows of {table}: too many")
                if types[-1] is bytes:
                    room -= len(row[-1])
                    if room < 0:
                        raise self._malformed(f"the rows of {table} hold more than the file")
                yield row
        except UNREADABLE as error:
            raise self._damaged(error) from error

    def _has_nan(self, table: str, row: Row) -> bool:
        """Whether a number of this row is kept as text; an error where a type is wrong."""
        for value, kinds in zip(row, _TYPES[table], strict=True):
            if type(value) not in kinds:
                raise self._malformed(f"a row of {table} holds {str(value)[:60]!r}")
        pairs = zip(row, _TYPES[table], strict=True)
        return any(kinds is _NUMBER and type(value) is str for value, kinds in pairs)

    def _with_nan(self, table: str, row: Row) -> Row:
        """The row with NaN where the text says so."""
        values = []
        for value, kinds in zip(row, _TYPES[table], strict=True):
            if kinds is _NUMBER and type(value) is str:
                if value != "nan":
                    raise self._malformed(f"{value[:60]!r} stands in the place of a number")
                value = math.nan
            values.append(value)
        return tuple(values)

    def _damaged(self, error: Exception) -> RunError:
        return RunError(f"{self._file} is damaged or is not a run: {error}")

    def _malformed(self, what: str) -> RunError:
        return RunError(f"{self._file} is damaged: {what}")


def _merged(table: str, older: Iterator[Row], newer: Iterator[Row]) -> Iterator[Row]:
    """The rows of both in the order of keys; where both have one, the newer."""
    size = len(schema.TABLES[table].key)
    join = _join_steps if table == "steps" else _take_newer
    old = next(older, None)
    for new in newer:
        while old is not None and old[:size] < new[:size]:
            yield old
            old = next(older, None)
        if old is not None and old[:size] == new[:size]:
            new = join(old, new)
            old = next(older, None)
        yield new
    if old is not None:
        yield old
        yield from older


def _take_newer(_: Row, new: Row) -> Row:
    return new


def _join_steps(old: Row, new: Row) -> Row:
    """A step that frames of the tail change: as `schema.apply` would change its row."""
    step, time, loss, lr, *rest = new
    if loss is None:
        loss = old[2]
    if lr is None:
        lr = old[3]
    if time is None:  # only logged to
        return (step, old[1], loss, lr, *old[4:])
    return (step, time, loss, lr, *rest)
