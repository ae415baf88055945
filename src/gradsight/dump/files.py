"""The few things done to the disk, each of them durable when it returns. No torch."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

BLOCK = 1 << 26
"""How many bytes are handed to the system in one call."""


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and make their names durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with suppress(FileNotFoundError):
        path.mkdir(parents=True, exist_ok=True)
    path.mkdir(parents=True, exist_ok=True)  # again, in case another dumper has just removed the empty parent
    for folder in missing:
        sync_folder(folder.parent)


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts one after the other and return when they are on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for part in parts:
            write_all(handle, memoryview(part).cast("B"))
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: memoryview) -> None:
    """Write every byte: one call may take only a part of what it is given."""
    done = 0
    while done < len(data):
        done += os.write(handle, data[done : done + BLOCK])


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """Rename, and make both folders know it."""
    os.rename(source, target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder and what is in it, if it is there."""
    if path.exists():
        shutil.rmtree(path)


def remove_if_empty(path: Path) -> None:
    """Remove a folder with nothing in it; one that is in use stays."""
    with suppress(OSError):
        path.rmdir()


def free_bytes(path: Path) -> int:
    """What the file system of this path, or of its nearest existing parent, can still take."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(nearest).free
