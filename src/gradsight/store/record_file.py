"""run.sqlite as a file: published whole, and never written to again. No torch.

The writer builds the next one beside it and renames it over the old, so that nobody needs a lock, a
journal or shared memory to read it: SQLite is told that it is immutable, on any file system and on
read-only media, and looks for no journal that a stranger may have laid beside it.

The file carries a checksum of itself: crc32 of all its bytes with the four of `user_version` (at
byte 60) taken as zero, kept in those four. `application_id` says that it has one.
"""

import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from gradsight.core import limits, rundir
from gradsight.core.places import open_file
from gradsight.errors import RunError, WrongPlace

APPLICATION = int.from_bytes(b"GSrn", "big")
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises of a file that is none of ours: its own messages may be no text."""
_SQLITE = b"SQLite format 3\0"
_HEADER_SIZE = 100
CHECKSUM_AT = 60
_APPLICATION_AT = 68
_BLOCK = 1 << 20
_OPERATIONS = 100_000
_SETTLED = 2.0

_proven: dict[tuple[int, int, int, int], int] = {}
"""Checksums of files that were read whole in this process, by what changes with their bytes."""


class ReadingConnection(sqlite3.Connection):
    """A connection to a file that a stranger may have made."""

    def be_careful(self) -> None:
        """Let no value be larger than any of ours, and no query run without end."""
        self.patience = Patience()
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.FRAME_BYTES)
        self.set_progress_handler(self.patience.has_ended, _OPERATIONS)
        self.execute("PRAGMA trusted_schema = OFF")
        self.execute("PRAGMA temp_store = MEMORY")


class Patience:
    """Ends a query that works for long and gives no row."""

    def __init__(self) -> None:
        self._asked = 0

    def has_ended(self) -> bool:
        """Asked by SQLite every so many operations."""
        self._asked += 1
        return self._asked > limits.QUIET_OPERATIONS

    def renew(self) -> None:
        """A row has come."""
        self._asked = 0


def file_checksum(handle: int) -> int:
    """crc32 of a record, its own checksum taken as zero."""
    first = bytearray(os.pread(handle, _HEADER_SIZE, 0))
    first[CHECKSUM_AT : CHECKSUM_AT + 4] = bytes(4)
    checksum = zlib.crc32(first)
    position = len(first)
    while block := os.pread(handle, _BLOCK, position):
        checksum = zlib.crc32(block, checksum)
        position += len(block)
    return checksum


def seal(handle: int) -> None:
    """Write a new record's checksum into it, and wait for the disk."""
    os.pwrite(handle, struct.pack(">I", file_checksum(handle)), CHECKSUM_AT)
    os.fsync(handle)


def prove_whole(handle: int, file: Path) -> None:
    """An error where a record's bytes do not fit its checksum, or it is no record at all."""
    header = os.pread(handle, _HEADER_SIZE, 0)
    if not header.startswith(_SQLITE):
        raise RunError(f"{file} is damaged or is not a run: file is not a database")
    if header[_APPLICATION_AT:][:4] != struct.pack(">I", APPLICATION):
        raise _no_record(file)
    (claimed,) = struct.unpack_from(">I", header, CHECKSUM_AT)
    if _known_checksum(handle) != claimed:
        raise RunError(f"{file} is damaged: its bytes do not fit its checksum{_or_newer(file)}")


def _known_checksum(handle: int) -> int:
    seen = os.fstat(handle)
    key = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns)
    if key in _proven:
        return _proven[key]
    checksum = file_checksum(handle)
    # A file that was written this very moment can change again without its time changing.
    if time.time() - seen.st_mtime > _SETTLED:
        _proven[key] = checksum
    return checksum


@contextmanager
def open_record(run_dir: Path) -> Iterator[int]:
    """The published record, proven whole; not through a link."""
    file = run_dir / rundir.RECORD
    try:
        handle = open_file(run_dir, rundir.RECORD)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    try:
        prove_whole(handle, file)
        yield handle
    finally:
        os.close(handle)


def connect(run_dir: Path) -> tuple[ReadingConnection, os.stat_result]:
    """A connection that reads the record as it is now, and the file that it reads."""
    file = run_dir / rundir.RECORD
    # Published twice while it is being opened is rare; ten times is a file that is not ours.
    for _ in range(10):
        with open_record(run_dir) as handle:
            connection = connect_unchanging(file)
            identity = os.fstat(handle)
            if os.path.samestat(identity, os.lstat(file)):
                return connection, identity
        connection.close()
    raise RunError(f"{file} is being replaced again and again, and cannot be read")


def connect_unchanging(file: Path) -> ReadingConnection:
    """A connection to a file that nobody writes: without locks, journals, or shared memory."""
    address = f"{file.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        connection = sqlite3.connect(
            address, uri=True, check_same_thread=False, factory=ReadingConnection
        )
        connection.be_careful()
    except UNREADABLE as error:
        raise RunError(f"{file} cannot be opened: {error}") from error
    return connection


def copy_record(source: int, target: int) -> None:
    """Copy a record that was proven whole; an error if it is no longer."""
    first = bytearray(os.pread(source, _HEADER_SIZE, 0))
    claimed = first[CHECKSUM_AT : CHECKSUM_AT + 4]
    first[CHECKSUM_AT : CHECKSUM_AT + 4] = bytes(4)
    checksum = zlib.crc32(first)
    _write_all(target, first)
    position = len(first)
    while block := os.pread(source, _BLOCK, position):
        checksum = zlib.crc32(block, checksum)
        _write_all(target, block)
        position += len(block)
    # Damage that is copied would get a checksum of its own, and be believed for ever.
    if struct.pack(">I", checksum) != claimed:
        raise RunError("the record is damaged: its bytes do not fit its checksum")


def _write_all(handle: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _no_record(file: Path) -> RunError:
    """What to say of a database that does not say that it is ours."""
    with suppress(RunError, *UNREADABLE), closing(connect_unchanging(file)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master LIMIT 100").fetchall()
        if ("meta",) not in tables:
            return WrongPlace(f"{file} is a SQLite file, but not the record of a run")
    return RunError(f"{file} is damaged: it does not say any more that it is the record of a run")


def _or_newer(file: Path) -> str:
    """What else a record may be that does not fit its checksum: one of a format to come."""
    with suppress(Exception), closing(connect_unchanging(file)) as connection:
        rows = dict(connection.execute("SELECT key, value FROM meta LIMIT 100"))
        if isinstance(rows["schema"], int) and rows["schema"] > 2:
            return f", unless it was written by a newer version: it has schema {rows['schema']}"
    return ""
