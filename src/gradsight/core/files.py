"""Files and folders that are there whole or not at all, and durable when a call returns. No torch.

A file or folder is written under a temporary name beside its target, forced to the disk, and
renamed; then its name is forced to the disk too. Temporary names are random and made by us alone
(a name that is already there may be a link to somebody's own file). Whoever is killed in between
leaves one behind, which nobody reads and the next writer removes.

`below` is a folder that a stranger may have sent: between it and what is written no link is
followed. Left out, it is the folder that the target lies in.
"""

import ctypes
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gradsight.core.file_locks import lock_alone, lock_when_free
from gradsight.core.places import (
    A_FOLDER,
    NO_LINK,
    NO_WAIT,
    ONLY_HERE,
    kind_in,
    make_below,
    open_folder,
    remove_below,
    remove_name,
)

_libc: Any = None
if sys.platform == "linux":
    _libc = ctypes.CDLL(None)
_sync_file_range: Any = getattr(_libc, "sync_file_range", None)
_renameat2: Any = getattr(_libc, "renameat2", None)

_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE of Linux: begin with these bytes, and do not wait for them."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux: two names change places, and neither is ever missing."""

BLOCK = 1 << 23
"""Bytes handed to the system in one call, and sent to the disk while the next are prepared."""

SYNCING = 16
"""How many small files are made durable at a time."""

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial")
_NEW = os.O_CREAT | os.O_EXCL | NO_LINK | ONLY_HERE
_ABANDONED = 3600.0
"""Seconds after which a temporary file is nobody's, where files cannot be locked."""


@contextmanager
def whole_file(path: Path, *, below: Path | None = None) -> Iterator[Path]:
    """A temporary path to write a file to, which becomes `path` when the block ends well.

    Where it does not end well, an older file at `path` stays and the temporary one goes. A link at
    `path` is replaced, not followed.
    """
    with _folder_of(path, below) as folder:
        _remove_leftovers(folder, path.name)
        name, handle = _temporary_file(path.name, folder)
        try:
            yield path.with_name(name)
            # A library may have put a file of its own there, that only its owner can read.
            _sync_name(name, folder, stat.S_IMODE(os.fstat(handle).st_mode))
            os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            # On a full disk the half-written file would keep the room that others need.
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(handle)
        os.fsync(folder)


def write_text(path: Path, text: str, *, below: Path | None = None) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path, below=below) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: Path, *, below: Path | None = None) -> Iterator[Path]:
    """An empty folder to write files into, which becomes `path` when the block ends well.

    Its files get the mode that the user's umask gives, whatever a library has made of it.
    """
    make_folder(path.parent, below=below)
    with _folder_of(path, below) as folder:
        _remove_leftovers(folder)
        name, handle = _temporary_folder(path.name, folder)
        partial = path.with_name(name)
        try:
            yield partial
            mode = stat.S_IMODE(os.fstat(handle).st_mode) & 0o666
            for file in partial.iterdir():
                if file.is_file():
                    file.chmod(mode)
            sync_files(partial.iterdir())
            finish_folder(partial, path, below=below)
        except BaseException:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
            raise
        finally:
            os.close(handle)


def finish_folder(partial: Path, path: Path, *, below: Path | None = None) -> None:
    """Rename a folder whose files are durable already; an older one beside it is replaced."""
    sync_path(partial)
    with _folder_of(path, below) as folder:
        if kind_in(path.name, folder) is None:
            os.rename(partial.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        elif not _exchanged(partial.name, path.name, folder):
            # The older one leaves under another name: half removed, it would still look like one.
            older = f".{path.name}.{secrets.token_hex(4)}.partial"
            os.rename(path.name, older, src_dir_fd=folder, dst_dir_fd=folder)
            os.rename(partial.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            remove_tree(path.with_name(older), below=below)
        os.fsync(folder)
    # After an exchange the older folder has the temporary name.
    remove_tree(partial, below=below)


def make_folder(path: Path, *, below: Path | None = None, sync: bool = True) -> None:
    """Create a folder and its parents, and make their names durable.

    One that is renamed later needs no durable name before: then `sync` is False.
    """
    if below is not None:
        if not below.exists():
            make_folder(below)
        make_below(below, path.relative_to(below), sync)
        return
    # A new name is durable when the folder that holds it is.
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_path(folder.parent)


def write_file(path: Path, parts: Iterable[bytes | memoryview], sync: bool = True) -> None:
    """Write the parts one after the other, and wait for the disk unless `sync` is False.

    For files of a new folder that is itself whole or not there; `whole_file` is for those that
    stand alone.
    """
    handle = os.open(path, os.O_WRONLY | _NEW, 0o666)
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


def move(source: Path, target: Path, *, below: Path) -> None:
    """Rename, and make the new name durable."""
    with _folder_of(source, below) as old, _folder_of(target, below) as new:
        os.rename(source.name, target.name, src_dir_fd=old, dst_dir_fd=new)
        os.fsync(new)


def remove_tree(path: Path, *, below: Path | None = None) -> None:
    """Remove a file or a folder with all in it, if it is there; of a link, the link alone."""
    root = below or path.parent
    with suppress(FileNotFoundError):
        remove_below(root, path.relative_to(root))


def remove_if_empty(path: Path, *, below: Path | None = None) -> None:
    """Remove a folder with nothing in it; one that is in use stays."""
    # The system refuses to remove a folder that is not empty, and what is no folder.
    with suppress(OSError), _folder_of(path, below) as folder:
        os.rmdir(path.name, dir_fd=folder)


def free_bytes(path: Path) -> int:
    """The free bytes of the file system of this path, or of its nearest existing parent."""
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(nearest).free


@contextmanager
def _folder_of(path: Path, below: Path | None) -> Iterator[int]:
    """A descriptor of the folder that a path lies in."""
    root = below or path.parent
    with open_folder(root, path.parent.relative_to(root)) as folder:
        yield folder


def _temporary_file(name: str, folder: int) -> tuple[str, int]:
    """A new file beside one of this name: its own name, and a descriptor that holds its lock."""
    while True:
        temporary = f".{name}.{secrets.token_hex(4)}.partial"
        handle = os.open(temporary, os.O_RDWR | _NEW, 0o666, dir_fd=folder)
        if _is_locked_in_time(handle):
            return temporary, handle


def _temporary_folder(name: str, folder: int) -> tuple[str, int]:
    """The same for a folder."""
    while True:
        temporary = f".{name}.{secrets.token_hex(4)}.partial"
        os.mkdir(temporary, dir_fd=folder)
        handle = os.open(temporary, os.O_RDONLY | A_FOLDER | ONLY_HERE, dir_fd=folder)
        if _is_locked_in_time(handle):
            return temporary, handle


def _is_locked_in_time(handle: int) -> bool:
    """Lock what was made just now; False where another writer has taken it for a leftover."""
    lock_when_free(handle)
    if os.fstat(handle).st_nlink:
        return True
    os.close(handle)
    return False


def _remove_leftovers(folder: int, of: str | None = None) -> None:
    """Remove what a killed writer has left of a file, or of any file or folder."""
    for name in os.listdir(folder):
        match = _TEMPORARY.fullmatch(name)
        ours = match is not None and of in (None, match[1])
        # Without anything random: as they were called before.
        if (ours or name == f"{of}.partial") and _is_abandoned(name, folder):
            with suppress(OSError):
                remove_name(name, folder)


def _is_abandoned(name: str, folder: int) -> bool:
    """Whether this is a file or folder that nobody writes; never a link, for we make none."""
    try:
        flags = os.O_RDONLY | NO_LINK | NO_WAIT
        handle = os.open(name, flags, dir_fd=folder)
    except OSError:
        return False
    try:
        return lock_alone(handle) or time.time() - os.fstat(handle).st_mtime > _ABANDONED
    except OSError:  # somebody writes it
        return False
    finally:
        os.close(handle)


def _exchanged(one: str, other: str, folder: int) -> bool:
    """Let two names change places; False where the system cannot."""
    if _renameat2 is None:
        return False
    answer: int = _renameat2(folder, os.fsencode(one), folder, os.fsencode(other), _EXCHANGE)
    return answer == 0


def _sync_name(name: str, folder: int, mode: int) -> None:
    """Make a file durable, with this mode."""
    handle = os.open(name, os.O_RDONLY | NO_LINK | ONLY_HERE, dir_fd=folder)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) != mode:
            os.fchmod(handle, mode)
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_abandoned(folder: Path, *names: str) -> None:
    """Remove what killed writers have left of files with these names, or of any file."""
    with open_folder(folder) as handle:
        for name in names or (None,):
            _remove_leftovers(handle, name)
