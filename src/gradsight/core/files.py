"""Files and folders that are there whole or not at all, and durable when a call returns. No torch.

A file or folder is written under a temporary name beside its target, forced to the disk, and
renamed; then its name is forced to the disk too. Whoever is killed in between leaves a `.partial`,
which nobody reads.
"""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_sync_file_range: Any = None
if sys.platform == "linux":
    _sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)

_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE of Linux: begin with these bytes, and do not wait for them."""

BLOCK = 1 << 23
"""Bytes handed to the system in one call, and sent to the disk while the next are prepared."""

SYNCING = 16
"""How many small files are made durable at a time."""


@contextmanager
def whole_file(path: Path, partial: Path | None = None) -> Iterator[Path]:
    """A temporary path to write a file to, which becomes `path` when the block ends well.

    Where it does not end well, an older file at `path` stays and the temporary one goes.
    """
    partial = partial or path.with_name(f"{path.name}.partial")
    try:
        yield partial
        sync_path(partial)
        os.replace(partial, path)
    except BaseException:
        # On a full disk the half-written file would keep the room that others need.
        with suppress(OSError):
            partial.unlink()
        raise
    sync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: Path, partial: Path) -> Iterator[Path]:
    """An empty folder to write files into, which becomes `path` when the block ends well."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_files(partial.iterdir())
        finish_folder(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def finish_folder(partial: Path, path: Path) -> None:
    """Rename a folder whose files are durable already; an older folder of that name is replaced."""
    sync_path(partial)
    # The older one leaves under another name: half removed, it would still look like a folder.
    older = partial.with_name(f"old-{partial.name}")
    shutil.rmtree(older, ignore_errors=True)
    if path.exists():
        os.rename(path, older)
    move(partial, path)
    shutil.rmtree(older, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and make their names durable."""
    # A new name is durable when the folder that holds it is.
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_path(folder.parent)


def write_file(path: Path, parts: Iterable[bytes | memoryview], sync: bool = True) -> None:
    """Write the parts one after the other, and wait for the disk unless `sync` is False.

    For files of a folder that is itself whole or not there; `whole_file` is for those that stand
    alone.
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
    """Wait until files that are already written are on the disk.

    They are asked for side by side, because the disk answers many requests together.
    """
    waiting = list(paths)
    try:
        with ThreadPoolExecutor(SYNCING) as pool:
            list(pool.map(sync_path, waiting))
    except RuntimeError:  # the interpreter is ending and starts no more threads
        for path in waiting:
            sync_path(path)


def write_all(handle: int, data: memoryview, position: int) -> int:
    """Write every byte and return the new position; one call of the system may take only a part."""
    done = 0
    while done < len(data):
        count = os.write(handle, data[done : done + BLOCK])
        if count == BLOCK:
            start_flushing(handle, position + done, count)
        done += count
    return position + done


def start_flushing(handle: int, position: int, count: int) -> None:
    """Have the disk begin with bytes that fsync will wait for; elsewhere fsync does it all."""
    # It makes nothing durable by itself; its answer does not matter, fsync's does.
    if _sync_file_range is not None:
        _sync_file_range(handle, ctypes.c_int64(position), ctypes.c_int64(count), _START_WRITING)


def sync_path(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """Rename, and make the new name durable."""
    os.rename(source, target)
    sync_path(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder and its files, if it is there."""
    if path.exists():
        shutil.rmtree(path)


def remove_if_empty(path: Path) -> None:
    """Remove a folder with nothing in it; one that is in use stays."""
    with suppress(OSError):  # the system refuses to remove a folder that is not empty
        path.rmdir()


def free_bytes(path: Path) -> int:
    """The free bytes of the file system of this path, or of its nearest existing parent."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(nearest).free
