"""Files below a folder that a stranger may have sent: no link in it is followed. No torch.

The folder itself (`root`) may be a link; whoever names it means it. Below it every component of a
path is opened by its own name in its parent (openat), and a link is refused wherever it leads: a
crafted run could otherwise have the reader's own files read, overwritten or removed. Nothing but
plain files is opened, so that a FIFO or a device cannot hold anybody up.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath

from gradsight.errors import RunError, WrongPlace

# Windows has none of these, and can import this all the same: `open_folder` says what it lacks.
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
ONLY_HERE: int = getattr(os, "O_CLOEXEC", 0)
A_FOLDER: int = getattr(os, "O_DIRECTORY", 0)
_FOLDER = os.O_RDONLY | A_FOLDER | ONLY_HERE
# Opening a FIFO for reading waits for a writer, unless this is said.
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0) | ONLY_HERE

_CAN_OPEN_BELOW = os.open in os.supports_dir_fd
_TRIES = 200
"""How often a folder is made again that others tidy away while it is empty."""


@contextmanager
def open_folder(root: Path, folder: str | PurePath = "") -> Iterator[int]:
    """A descriptor of a folder below `root`, for the dir_fd of the functions of `os`."""
    if not _CAN_OPEN_BELOW:
        raise WrongPlace(
            f"{root} cannot be opened safely on this system: Gradsight keeps and reads runs on "
            "Linux and macOS only. Without run_dir, gradsight.watch and GhostEngine should work "
            "here, and keep nothing"
        )
    handle = os.open(root, _FOLDER)
    try:
        for name in _names(folder):
            inner = _open(name, _FOLDER | NO_LINK, handle, root / folder)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def open_file(root: Path, file: str | PurePath, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of a plain file below `root`; the user's umask is taken from the mode."""
    *parents, name = _names(file)
    with open_folder(root, PurePath(*parents)) as folder:
        handle = _open(name, flags | NO_LINK | NO_WAIT, folder, root / file, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RunError(f"{root / file} is not a plain file")
    return handle


def read_file(root: Path, file: str | PurePath, limit: int) -> bytes:
    """All bytes of a file below `root`; one that is larger than `limit` is refused."""
    handle = open_file(root, file)
    with os.fdopen(handle, "rb") as opened:
        size = os.fstat(handle).st_size
        if size > limit:
            raise RunError(f"{root / file} has {size} bytes; at most {limit} are read")
        return opened.read(limit)


def names_in(root: Path, folder: str | PurePath = "") -> list[str]:
    """The names in a folder below `root`, sorted; none where there is no such folder."""
    try:
        with open_folder(root, folder) as handle:
            return sorted(os.listdir(handle))
    except FileNotFoundError:
        return []


def refuse_links(root: Path, path: str | PurePath) -> Path:
    """The whole path, for libraries that open files themselves; an error if a link is in it."""
    *parents, name = _names(path)
    # What is not there, or cannot be, is no link; whoever opens it says what is wrong with it.
    with suppress(OSError), open_folder(root, PurePath(*parents)) as folder:
        if kind_in(name, folder) == "link":
            raise _is_link(root / path)
    return root / path


def kind_in(name: str, folder: int) -> str | None:
    """What a name in an open folder is: "file", "folder", "link", "other"; None: nothing."""
    try:
        mode = os.lstat(name, dir_fd=folder).st_mode
    except FileNotFoundError:
        return None
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "other")


def kind_below(root: Path, path: str | PurePath) -> str | None:
    """The same of a path below `root`; None also where a link or a file stands in the way."""
    *parents, name = _names(path)
    try:
        with open_folder(root, PurePath(*parents)) as folder:
            return kind_in(name, folder)
    except (OSError, RunError):
        return None


def make_below(root: Path, folder: str | PurePath, sync: bool = True) -> None:
    """Create a folder below `root` and its parents; their names are durable, unless not asked."""
    for _ in range(_TRIES):
        try:
            _make_all(root, folder, sync)
            return
        except FileNotFoundError:
            # Another process may have tidied away a parent that was still empty.
            if not root.exists():
                raise
    _make_all(root, folder, sync)


def _make_all(root: Path, folder: str | PurePath, sync: bool) -> None:
    done = PurePath()
    for name in _names(folder):
        with open_folder(root, done) as parent:
            if kind_in(name, parent) is None:
                _make(name, parent, root / done / name)
                if sync:
                    os.fsync(parent)
        done /= name
    with open_folder(root, done):  # says what is wrong where a link or a file has the name
        pass


def remove_below(root: Path, path: str | PurePath) -> None:
    """Remove a file, a link itself, or a folder with all that is in it; nothing a link leads to."""
    *parents, name = _names(path)
    with open_folder(root, PurePath(*parents)) as folder:
        remove_name(name, folder)


def remove_name(name: str, folder: int) -> None:
    """The same of a name in an open folder."""
    kind = kind_in(name, folder)
    if kind == "folder":
        shutil.rmtree(name, dir_fd=folder)
    elif kind is not None:
        os.unlink(name, dir_fd=folder)


def _names(path: str | PurePath) -> tuple[str, ...]:
    """The components of a path that stays below its root."""
    parts = PurePath(path).parts
    if PurePath(path).is_absolute() or ".." in parts:
        raise RunError(f"{path} leads out of its folder")
    # A stranger's name may be none that a file system can have: zeros, halves of characters.
    if "\0" in str(path) or not _is_encodable(str(path)):
        raise RunError(f"{path!r} cannot be the name of a file")
    return parts


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _open(name: str, flags: int, folder: int, whole: Path, mode: int = 0o666) -> int:
    try:
        return os.open(name, flags, mode, dir_fd=folder)
    except OSError as error:
        # ELOOP: a link at the end; ENOTDIR: a link where a folder should be.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and kind_in(name, folder) == "link":
            raise _is_link(whole) from error
        # Of a name alone nobody could tell which file it is.
        error.filename = str(whole)
        raise


def _make(name: str, parent: int, whole: Path) -> None:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        pass  # another process was faster
    except OSError as error:
        error.filename = str(whole)
        raise


def _is_link(path: Path) -> RunError:
    return WrongPlace(f"{path} is behind a link, and links inside a run are not followed")
