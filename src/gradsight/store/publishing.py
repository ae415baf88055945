"""Makes the next run.sqlite, whole, and puts it into the place of the last. No torch."""

import secrets
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from gradsight.core import rundir
from gradsight.core.files import whole_file
from gradsight.store import schema
from gradsight.store.record_file import CHECKSUM_AT, copy_record, open_record, seal
from gradsight.store.tail_file import Frame, TailReader
from gradsight.store.thinning import thin


def create_record(run_dir: Path) -> None:
    """Write the record of a run that has no step yet."""
    with closing(sqlite3.connect(":memory:")) as connection:
        schema.create_tables(connection, new_run_number())
        data = bytearray(connection.serialize())
    data[CHECKSUM_AT : CHECKSUM_AT + 4] = struct.pack(">I", zlib.crc32(data))
    with whole_file(run_dir / rundir.RECORD, below=run_dir) as partial:
        partial.write_bytes(data)


def publish(run_dir: Path, tail: TailReader, last: int, most: int | None = None) -> bool:
    """Publish the record with all frames of its tail up to the one of this number.

    most: how many bytes it may take; then old steps are put together, and True says so.
    """
    thinned = False
    with (
        open_record(run_dir) as source,
        whole_file(run_dir / rundir.RECORD, below=run_dir) as next,
        next.open("r+b") as target,
    ):
        copy_record(source, target.fileno())
        with closing(_connect(next)) as connection:
            known = schema.read_meta(connection)["last_frame"]
            schema.apply(connection, _between(tail, known, last))
            if most is not None:
                thinned = thin(connection, most)
        seal(target.fileno())
    return thinned


def new_run_number() -> int:
    """By which a tail and its record know each other."""
    return secrets.randbits(63)


def _between(tail: TailReader, known: int, last: int) -> Iterator[Frame]:
    for frame in tail.frames():
        if frame[0] > last:
            return
        if frame[0] > known:
            yield frame


def _connect(file: Path) -> sqlite3.Connection:
    """A connection to a file that nobody else knows: nothing has to be locked, or undone."""
    # Whoever is killed leaves a file without its name; locks may not exist on this file system.
    address = f"{file.absolute().as_uri()}?vfs=unix-none"
    connection = sqlite3.connect(address, uri=True, check_same_thread=False)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA temp_store = MEMORY")
    # Mapped into memory, a file that cannot be written any more ends the process.
    connection.execute("PRAGMA mmap_size = 0")
    return connection
