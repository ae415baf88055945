"""The tables of run.sqlite, and how rows get into them.

One packed row per step keeps a long run small: 16 KiB pages hold about seven steps of 150
parameters. SQLite stores no NaN (it becomes NULL), so a NaN is kept as the text 'nan'.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from gradsight.errors import WrongPlace
from gradsight.store import tail_format as frames

VERSION = 1

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE layouts (layout INTEGER PRIMARY KEY, names TEXT NOT NULL);
CREATE TABLE steps (step INTEGER PRIMARY KEY, time REAL, loss REAL, lr REAL, total_norm REAL,
                    clip_coef REAL, scale REAL, skipped INTEGER, gradient TEXT);
CREATE TABLE stats (step INTEGER PRIMARY KEY, layout INTEGER NOT NULL, packed BLOB NOT NULL);
CREATE TABLE histograms (step INTEGER NOT NULL, source TEXT NOT NULL, packed BLOB NOT NULL,
                         PRIMARY KEY (step, source));
CREATE TABLE scalars (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
                      PRIMARY KEY (step, name)) WITHOUT ROWID;
CREATE TABLE records (kind TEXT NOT NULL, key TEXT NOT NULL, step INTEGER NOT NULL,
                      value TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;
"""

_TRACKED = """
CREATE TABLE IF NOT EXISTS tracked (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
                                    PRIMARY KEY (step, name)) WITHOUT ROWID
"""
"""What trackers were given, under a count of their own; records of earlier versions lack it."""

_ADD_STEP = """
INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (step) DO UPDATE SET
    time = excluded.time,
    loss = coalesce(excluded.loss, loss),
    lr = coalesce(excluded.lr, lr),
    total_norm = excluded.total_norm,
    clip_coef = excluded.clip_coef,
    scale = excluded.scale,
    skipped = excluded.skipped,
    gradient = excluded.gradient
"""
"""Loss and learning rate may have been logged before the step was made: those stay."""

_STEPPED = ("steps", "stats", "scalars", "records")
_OWN_COLUMNS = ("loss", "lr")


def create_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables in an empty file; refuse one that is not ours or too new."""
    # With the default pages of 4 KiB a long run took half as much again on the disk.
    connection.execute("PRAGMA page_size = 16384")
    # With a write-ahead log readers do not stop the writer, and a commit needs no fsync.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        connection.executescript(_TABLES)
        connection.execute("INSERT INTO meta VALUES ('schema', ?), ('last_frame', 0)", (VERSION,))
        connection.commit()
    check_version(connection, path)
    connection.execute(_TRACKED)


def has_tracked(connection: sqlite3.Connection) -> bool:
    """Whether the record has the table of trackers."""
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'tracked'"
    return bool(connection.execute(query).fetchone()[0])


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a run, or was written by a newer Gradsight."""
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        row = None
    if row is None:
        raise WrongPlace(f"{path} is a SQLite file, but not the record of a run")
    if row[0] > VERSION:
        raise WrongPlace(
            f"{path} has schema {row[0]}, this Gradsight reads up to {VERSION}: "
            "it was written by a newer version. Update with: pip install --upgrade gradsight"
        )


def last_frame(connection: sqlite3.Connection) -> int:
    """The number of the last frame that has reached the tables."""
    return int(connection.execute("SELECT value FROM meta WHERE key = 'last_frame'").fetchone()[0])


def apply(connection: sqlite3.Connection, batch: Iterable[frames.Frame]) -> None:
    """Bring frames into the tables, all of them or none."""
    # One transaction with the number of the last frame: a frame cannot be brought in twice.
    with connection:
        last = None
        for number, kind, payload in batch:
            _APPLY[kind](connection, payload)
            last = number
        if last is not None:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'last_frame'", (last,))


def last_step(connection: sqlite3.Connection) -> int | None:
    """The last step of the record; one that was only logged to has not been made."""
    row = connection.execute("SELECT max(step) FROM steps WHERE time IS NOT NULL").fetchone()
    last: int | None = row[0]
    return last


def forget_from(connection: sqlite3.Connection, step: int) -> None:
    """Remove this step and all later ones: they are going to be run again."""
    with connection:
        for table in _STEPPED:
            connection.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))
        # A tracker's histograms have a name, and a count of their own.
        connection.execute("DELETE FROM histograms WHERE step >= ? AND source = ''", (step,))


def _apply_step(connection: sqlite3.Connection, payload: bytes) -> None:
    step, layout, packed = frames.unpack_step(payload)
    numbers = (step.loss, step.lr, step.total_norm, step.clip_coef, step.scale)
    row = (step.step, step.time, *map(_storable, numbers), int(step.skipped), step.gradient)
    connection.execute(_ADD_STEP, row)
    _add_scalars(connection, step.step, dict(step.scalars))
    if packed:
        connection.execute(
            "INSERT OR REPLACE INTO stats VALUES (?, ?, ?)", (step.step, layout, packed)
        )


def _apply_scalars(connection: sqlite3.Connection, payload: bytes) -> None:
    _add_scalars(connection, *frames.unpack_scalars(payload))


def _apply_tracked(connection: sqlite3.Connection, payload: bytes) -> None:
    _add_scalars(connection, *frames.unpack_scalars(payload), table="tracked")


def _apply_step_scalars(connection: sqlite3.Connection, payload: bytes) -> None:
    step, values = frames.unpack_scalars(payload)
    for name in [name for name in _OWN_COLUMNS if name in values]:
        value = _storable(values.pop(name))
        replace = f"ON CONFLICT (step) DO UPDATE SET {name} = excluded.{name}"
        query = f"INSERT INTO steps (step, {name}) VALUES (?, ?) {replace}"
        connection.execute(query, (step, value))
    _add_scalars(connection, step, values)


def _add_scalars(
    connection: sqlite3.Connection, step: int, values: dict[str, float], table: str = "scalars"
) -> None:
    rows = [(step, name, _storable(value)) for name, value in values.items()]
    connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", rows)


def _apply_histograms(connection: sqlite3.Connection, payload: bytes) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO histograms VALUES (?, ?, ?)", frames.unpack_histogram_step(payload)
    )


def _apply_record(connection: sqlite3.Connection, payload: bytes) -> None:
    kind, key, step, value = frames.unpack_record(payload)
    connection.execute(
        "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", (kind, key, step, value)
    )


def _apply_layout(connection: sqlite3.Connection, payload: bytes) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO layouts VALUES (?, ?)", frames.unpack_layout(payload)
    )


_APPLY = {
    frames.LAYOUT: _apply_layout,
    frames.STEP: _apply_step,
    frames.SCALARS: _apply_scalars,
    frames.STEP_SCALARS: _apply_step_scalars,
    frames.TRACKED: _apply_tracked,
    frames.HISTOGRAMS: _apply_histograms,
    frames.RECORD: _apply_record,
}


def _storable(value: float | None) -> float | str | None:
    """A number as SQLite can keep it: it would make NULL of a NaN."""
    if value is not None and value != value:
        return "nan"
    return value
