"""The runs below a folder, and whether one has changed since it was looked at. No torch.

No link that leads out of the folder is followed: a folder of runs may be a stranger's.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from gradsight.core import rundir

DEPTH = 3
"""How far below the folder runs are looked for: runs/experiment/seed."""
MOST_RUNS = 2000
_NOT_LOOKED_INTO = {
    rundir.INCIDENTS,
    rundir.DUMPS,
    rundir.SCORES,
    rundir.CHECKPOINTS,
    rundir.TENSORBOARD,
}
_WATCHED = (rundir.RECORD, rundir.TAIL, rundir.CONFIG)

Fingerprint = tuple[tuple[int, int, int] | None, ...]
"""Of every file of the record: which file it is, its size, when it was written."""


def runs_in(folder: Path) -> dict[str, Path]:
    """The runs below a folder by their paths inside it, in the order of names."""
    root = folder.resolve()
    found = {}
    for place in _walk(root, root, DEPTH):
        found[place.relative_to(root).as_posix()] = place
        if len(found) == MOST_RUNS:
            break
    return dict(sorted(found.items()))


def run_in(folder: Path, name: str) -> Path | None:
    """The run of this name below a folder; None where there is none, or a link leads elsewhere."""
    if "\0" in name or name.startswith("/") or ".." in name.split("/"):
        return None
    root = folder.resolve()
    place = root / name
    return place if _is_run_inside(place, root) else None


def _walk(folder: Path, root: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return  # it went away, or is not ours to read
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _NOT_LOOKED_INTO:
            continue
        place = folder / entry.name
        if not _is_folder_inside(place, root):
            continue
        if _is_run_inside(place, root):
            yield place
        if depth > 1 and not entry.is_symlink():  # a link may lead back up
            yield from _walk(place, root, depth - 1)


def _is_folder_inside(place: Path, root: Path) -> bool:
    try:
        real = place.resolve(strict=True)
    except (OSError, RuntimeError):  # a link to nothing, or to itself
        return False
    return real.is_dir() and real.is_relative_to(root) and real != root


def _is_run_inside(place: Path, root: Path) -> bool:
    """Whether a folder is a run whose record is a file of its own."""
    record = place / rundir.RECORD
    try:
        own = not record.is_symlink() and record.is_file()
    except OSError:  # a name that no file system takes
        return False
    return own and (place == root or _is_folder_inside(place, root))


def fingerprint(run_dir: Path) -> Fingerprint:
    """Differs from the one before where something was written in between; all None: it is gone."""
    return tuple(_stamp(run_dir / name) for name in _WATCHED)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file, follow_symlinks=False)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
