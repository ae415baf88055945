"""The few things done to the disk, each of them durable when it returns. No torch."""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_sync_file_range: Any = (
    getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
)

BLOCK = 1 << 23
"""How many bytes are handed to the system in one call, and sent on to the disk while the next are
prepared.
"""

SYNCING = 16
"""How many small files are made durable at a time."""


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and make their names durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def write_file(path: Path, parts: Iterable[bytes | memoryview], sync: bool = True) -> None:
    """Write the parts one after the other and return when they are on the disk, or without `sync`
    on their way.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        position = 0
        for part in parts:
            position = write_all(handle, memoryview(part).cast("B"), position)
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """Return when files that are already written are on the disk; side by side, which the disk
    answers together.
    """
    waiting = list(paths)
    try:
        with ThreadPoolExecutor(SYNCING) as pool:
            list(pool.map(sync_folder, waiting))
    except RuntimeError:  # the interpreter is ending and starts no more threads
        for path in waiting:
            sync_folder(path)


def write_all(handle: int, data: memoryview, position: int) -> int:
    """Write every byte (one call may take only a part of what it is given) and return the new
    position.
    """
    done = 0
    while done < len(data):
        count = os.write(handle, data[done : done + BLOCK])
        if count == BLOCK:
            start_flushing(handle, position + done, count)
        done += count
    return position + done


def start_flushing(handle: int, position: int, count: int) -> None:
    """Have the disk begin with bytes that fsync will wait for; where the system cannot, fsync does
    it all.
    """
    if _sync_file_range is not None:
        _sync_file_range(handle, ctypes.c_int64(position), ctypes.c_int64(count), 2)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """Rename, and make it durable."""
    os.rename(source, target)
    sync_folder(target.parent)


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
