"""Is a dump on the disk what was written? Every byte of every file is compared. No torch."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradsight.dump.manifest import NAME, Manifest, Stored, read
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
    damage = [
        fault
        for name, stored in manifest.files.items()
        for fault in _check_file(folder, name, stored, manifest)
    ]
    extra = sorted({path.name for path in folder.iterdir()} - {*manifest.files, NAME})
    damage += [f"{name}: does not belong to the dump" for name in extra]
    return Verdict(
        folder,
        tuple(damage),
        len(manifest.tensors),
        sum(stored.bytes for stored in manifest.files.values()),
    )


def _check_file(folder: Path, name: str, stored: Stored, manifest: Manifest) -> list[str]:
    """What is wrong with one file: its length, a gradient in it, or the bytes between the
    gradients.
    """
    path = folder / name
    if not path.is_file():
        return [f"{name}: missing"]
    length = path.stat().st_size
    if length != stored.bytes:
        return [f"{name}: {length:,} bytes, expected {stored.bytes:,}"]
    if not length:
        return []
    content = np.memmap(path, np.uint8, "r")
    chunks = [
        (chunk, parameter)
        for parameter, entry in manifest.tensors.items()
        for chunk in entry.chunks
        if chunk.file == name
    ]
    damage, frame, position = [], 0, 0
    for chunk, parameter in sorted(chunks, key=lambda pair: pair[0].offset):
        frame = _crc(content[position : chunk.offset], frame)
        position = max(position, chunk.offset + chunk.bytes)
        if _crc(content[chunk.offset : chunk.offset + chunk.bytes], 0) != chunk.crc32:
            damage.append(f"{name}: the gradient of {parameter} is damaged")
    if _crc(content[position:], frame) != stored.frame_crc32:
        damage.append(f"{name}: damaged outside of the gradients")
    return damage


def _crc(content: np.ndarray[tuple[int], np.dtype[np.uint8]], start: int) -> int:
    """The checksum of some bytes, read in blocks."""
    for position in range(0, len(content), BLOCK):
        start = zlib.crc32(content[position : position + BLOCK].data, start)
    return start
