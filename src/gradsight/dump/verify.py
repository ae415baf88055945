"""Is a dump on the disk what was written? Every byte of every file is compared. No torch."""

import os
import zlib
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from gradsight.core.places import names_in, open_file
from gradsight.dump.manifest import NAME, Chunk, Stored, chunks_by_file, read
from gradsight.errors import RunError

BLOCK = 1 << 24


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found wrong with one dump: nothing, if it is intact."""

    folder: Path
    damage: tuple[str, ...]
    tensors: int = 0
    bytes: int = 0

    @property
    def intact(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.damage


def verify(folder: Path) -> Verdict:
    """Compare a dump's files with its manifest."""
    try:
        manifest = read(folder)
    except RunError as error:
        return Verdict(folder, (str(error),))
    chunks = chunks_by_file(manifest)
    damage = [
        fault
        for name, stored in manifest.files.items()
        for fault in _check_file(folder, name, stored, chunks[name])
    ]
    extra = sorted({*names_in(folder)} - {*manifest.files, NAME})
    damage += [f"{name}: does not belong to the dump" for name in extra]
    return Verdict(
        folder,
        tuple(damage),
        len(manifest.tensors),
        sum(stored.bytes for stored in manifest.files.values()),
    )


def _check_file(
    folder: Path, name: str, stored: Stored, chunks: list[tuple[Chunk, str]]
) -> list[str]:
    """What is wrong with one file: its length, a gradient in it, or the bytes between the
    gradients.
    """
    try:
        handle = open_file(folder, name)
    except FileNotFoundError:
        return [f"{name}: missing"]
    except (OSError, RunError) as error:
        return [f"{name}: cannot be read: {error}"]
    with os.fdopen(handle, "rb", buffering=0) as file:
        length = os.fstat(handle).st_size
        if length != stored.bytes:
            return [f"{name}: {length:,} bytes, expected {stored.bytes:,}"]
        damage, frame, position = [], 0, 0
        for chunk, parameter in chunks:
            frame = _crc(file, chunk.offset - position, frame)
            position = chunk.offset + chunk.bytes
            if _crc(file, chunk.bytes, 0) != chunk.crc32:
                damage.append(f"{name}: the gradient of {parameter} is damaged")
        if _crc(file, length - position, frame) != stored.frame_crc32:
            damage.append(f"{name}: damaged outside of the gradients")
    return damage


def _crc(file: BinaryIO | FileIO, count: int, start: int) -> int:
    """The checksum of the next bytes, read in blocks; it goes on from an earlier one."""
    while count > 0:
        block = file.read(min(count, BLOCK))
        if not block:  # it was cut off meanwhile
            return -1
        start = zlib.crc32(block, start)
        count -= len(block)
    return start
