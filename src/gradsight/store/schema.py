"""The tables of run.sqlite, and how rows get into them.

One packed row per step keeps a long run small: 16 KiB pages hold about seven steps of 150
parameters. SQLite stores no NaN (it becomes NULL), so a NaN is kept as the text 'nan'.
"""

import sqlite3
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsight.errors import RunError, WrongPlace
from gradsight.store import tail_format as frames
from gradsight.store.record_file import APPLICATION
from gradsight.store.tail_file import Frame

VERSION = 2
READER = "0.2.0"
"""The first version of Gradsight that reads this schema."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the record."""

    definition: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    """Rows come in the order of these columns, each combination once."""
    forgotten: str = ""
    """Which rows `forget` removes: a condition with the step as its only value."""
    may_lack: bool = False
    """Whether a record that has no such rows is without it."""


TABLES = {
    "meta": Table(
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID", ("key", "value"), ("key",)
    ),
    "layouts": Table(
        "CREATE TABLE layouts (layout INTEGER PRIMARY KEY, names TEXT NOT NULL)",
        ("layout", "names"),
        ("layout",),
    ),
    "steps": Table(
        "CREATE TABLE steps (step INTEGER PRIMARY KEY, time REAL, loss REAL, lr REAL, "
        "total_norm REAL, clip_coef REAL, scale REAL, skipped INTEGER, gradient TEXT)",
        ("step", "time", "loss", "lr", "total_norm", "clip_coef", "scale", "skipped", "gradient"),
        ("step",),
        forgotten="step >= ?",
    ),
    "stats": Table(
        "CREATE TABLE stats (step INTEGER PRIMARY KEY, layout INTEGER NOT NULL, "
        "packed BLOB NOT NULL)",
        ("step", "layout", "packed"),
        ("step",),
        forgotten="step >= ?",
    ),
    "histograms": Table(
        "CREATE TABLE histograms (step INTEGER NOT NULL, source TEXT NOT NULL, "
        "packed BLOB NOT NULL, PRIMARY KEY (step, source))",
        ("step", "source", "packed"),
        ("step", "source"),
        # A tracker's histograms have a name, and a count of their own.
        forgotten="step >= ? AND source = ''",
    ),
    "scalars": Table(
        "CREATE TABLE scalars (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, "
        "PRIMARY KEY (step, name)) WITHOUT ROWID",
        ("step", "name", "value"),
        ("step", "name"),
        forgotten="step >= ?",
    ),
    "records": Table(
        "CREATE TABLE records (kind TEXT NOT NULL, key TEXT NOT NULL, step INTEGER NOT NULL, "
        "value TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID",
        ("kind", "key", "step", "value"),
        ("kind", "key"),
        forgotten="step >= ?",
    ),
    # What trackers were given, under a count of their own.
    "tracked": Table(
        "CREATE TABLE tracked (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, "
        "PRIMARY KEY (step, name)) WITHOUT ROWID",
        ("step", "name", "value"),
        ("step", "name"),
    ),
    # Made when a model turns out to have experts: earlier versions read the record of any other.
    "experts": Table(
        "CREATE TABLE experts (step INTEGER NOT NULL, name TEXT NOT NULL, packed BLOB NOT NULL, "
        "PRIMARY KEY (step, name)) WITHOUT ROWID",
        ("step", "name", "packed"),
        ("step", "name"),
        forgotten="step >= ?",
        may_lack=True,
    ),
}

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

_OWN_COLUMNS = ("loss", "lr")


def create_tables(connection: sqlite3.Connection, run: int) -> None:
    """Create the tables of a new run in an empty database."""
    # With the default pages of 4 KiB a long run took half as much again on the disk.
    connection.execute("PRAGMA page_size = 16384")
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    with connection:
        for name, table in TABLES.items():
            if name != "experts":
                connection.execute(table.definition)
        rows = {"schema": VERSION, "reader": READER, "last_frame": 0, "run": run}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", rows.items())


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Whether the record has this table: only one with experts has theirs."""
    query = "SELECT count(*) FROM sqlite_master WHERE name = ?"
    return bool(connection.execute(query, (name,)).fetchone()[0])


def check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a run, was written by a newer Gradsight, or holds more than tables.

    A view in the place of a table would have SQLite compute whatever a stranger likes.
    """
    found = connection.execute("SELECT type, name, sql FROM sqlite_master LIMIT 64").fetchall()
    if not any(name == "meta" for _, name, _ in found):
        raise WrongPlace(f"{path} is a SQLite file, but not the record of a run")
    tables = [(name, sql) for kind, name, sql in found if kind != "index" or sql is not None]
    known = {name: table.definition for name, table in TABLES.items()}
    of_meta = [" ".join(str(sql).split()) for name, sql in tables if name == "meta"]
    if of_meta != [known["meta"]]:
        raise RunError(f"{path} is damaged or is not ours: its table of versions is another")
    _check_version(connection, path)
    for name, sql in tables:
        if known.pop(name, None) != " ".join(str(sql).split()):
            raise RunError(f"{path} is damaged or is not ours: {name!r} is none of our tables")
    missing = [name for name in known if not TABLES[name].may_lack]
    if missing:
        raise RunError(f"{path} is damaged: it has no table {min(missing)!r}")


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    meta = read_meta(connection)
    schema = meta.get("schema")
    if type(schema) is not int or type(meta.get("last_frame")) is not int:
        raise RunError(f"{path} is damaged: it does not say which schema it has")
    if schema > VERSION:
        needed = str(meta.get("reader"))[:40]
        raise WrongPlace(
            f"{path} has schema {schema}, this Gradsight reads up to {VERSION}: it was written by "
            f"a newer version, and takes Gradsight {needed} or later. "
            "Update with: pip install --upgrade gradsight"
        )


def read_meta(connection: sqlite3.Connection) -> dict[str, Any]:
    """What the record says of itself."""
    return dict(connection.execute("SELECT key, value FROM meta LIMIT 64"))


def apply(connection: sqlite3.Connection, batch: Iterable[Frame]) -> None:
    """Bring frames into the tables, all of them or none."""
    # One transaction with the number of the last frame: a frame cannot be brought in twice.
    with connection:
        last = None
        for number, kind, payload in batch:
            _apply_one(connection, kind, payload)
            last = number
        if last is not None:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'last_frame'", (last,))


def _apply_one(connection: sqlite3.Connection, kind: int, payload: bytes) -> None:
    if kind not in _APPLY:
        raise RunError(f"a frame of kind {kind} is unknown: a newer Gradsight may have written it")
    try:
        _APPLY[kind](connection, payload)
    except (struct.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunError(f"a frame of kind {kind} is malformed: {error}") from error
    except (sqlite3.InterfaceError, sqlite3.IntegrityError, OverflowError) as error:
        raise RunError(f"a frame of kind {kind} cannot be stored: {error}") from error


def last_step(connection: sqlite3.Connection, before: int) -> int | None:
    """The last step of the record before another; one that was only logged to was not made."""
    query = "SELECT step FROM steps WHERE time IS NOT NULL AND step < ? ORDER BY step DESC LIMIT 1"
    row = connection.execute(query, (before,)).fetchone()
    return None if row is None else row[0]


def _apply_forget(connection: sqlite3.Connection, payload: bytes) -> None:
    """Remove a step and all later ones: they are going to be run again."""
    step = frames.unpack_forget(payload)
    for name, table in TABLES.items():
        if table.forgotten and (name != "experts" or has_table(connection, name)):
            connection.execute(f"DELETE FROM {name} WHERE {table.forgotten}", (step,))


def _apply_step(connection: sqlite3.Connection, payload: bytes) -> None:
    fields, scalars, layout, packed = frames.unpack_step(payload)
    # SQLite would make NULL of a NaN.
    connection.execute(_ADD_STEP, ["nan" if each != each else each for each in fields])
    if scalars:
        _add_scalars(connection, fields[0], scalars)
    if packed:
        row = (fields[0], layout, packed)
        connection.execute("INSERT OR REPLACE INTO stats VALUES (?, ?, ?)", row)


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


def _apply_experts(connection: sqlite3.Connection, payload: bytes) -> None:
    step, groups = frames.unpack_experts(payload)
    if not has_table(connection, "experts"):
        connection.execute(TABLES["experts"].definition)
    rows = [(step, name, packed) for name, packed in groups]
    connection.executemany("INSERT OR REPLACE INTO experts VALUES (?, ?, ?)", rows)


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
    frames.FORGET: _apply_forget,
    frames.EXPERTS: _apply_experts,
}


def _storable(value: float | None) -> float | str | None:
    """A number as SQLite can keep it: it would make NULL of a NaN."""
    if value is not None and value != value:
        return "nan"
    return value
