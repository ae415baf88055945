"""Pictures of runs in the user's cache folder, so that a server that starts again need not read
a long run again. No torch.

A picture that is kept may be old, and its run another one by now: it says which step it ends with
and when that was made, and whoever takes it up compares.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VERSION = 2
_STATE = "state.json"
_LOCK = "lock"
_MOST_BYTES = 4 * 10**9
"""What all pictures together may take; the one that was not looked at for longest goes first."""


@dataclass(frozen=True)
class KeptState:
    """How far a kept picture goes."""

    names: Sequence[str]
    broken: Sequence[tuple[int, Sequence[str]]]
    """The first steps whose gradient is not finite, and the parameters concerned."""
    steps: int
    """How many it has."""
    last_step: int
    last_time: float
    """When that step was made: another run in the same place has another time."""
    first_time: float
    version: int = VERSION


def cache_root() -> Path:
    """Gradsight's folder among the user's caches."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The standard has relative paths ignored.
    if given.startswith("/"):
        base = Path(given)
    return base / "gradsight"


class PictureFolder:
    """The folder of one run's picture: in the cache, or a passing one where that cannot be had."""

    def __init__(self, run_dir: Path, root: Path | None = None) -> None:
        name = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:32]
        self._pictures = (root or cache_root()) / "pictures"
        self._lock: int | None = None
        self._passing: Path | None = None
        try:
            self.path = self._pictures / name
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(self.path)
        except OSError:
            # No home, a full or read-only disk, or another server that shows the same run.
            self._passing = Path(tempfile.mkdtemp(prefix="gradsight-"))
            self.path = self._passing
        else:
            _make_room(self._pictures, self.path)

    def kept(self) -> KeptState | None:
        """How far the picture in it goes; None where there is none."""
        try:
            state: Any = json.loads((self.path / _STATE).read_text())
            found = KeptState(**state)
        except (OSError, ValueError, TypeError):
            return None
        return found if found.version == VERSION else None

    def keep(self, state: KeptState) -> None:
        """Say how far the picture goes by now."""
        if self._lock is None:
            return
        # Nothing that could not be made again: a full disk only costs the time.
        with contextlib.suppress(OSError):
            partial = self.path / f"{_STATE}.partial"
            partial.write_text(json.dumps(asdict(state)))
            os.replace(partial, self.path / _STATE)

    def empty(self) -> None:
        """Remove the picture that is in it."""
        for file in self.path.iterdir():
            if file.name != _LOCK:
                file.unlink()

    def close(self) -> None:
        """Let others have it, or remove it if it was a passing one."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._passing is not None:
            shutil.rmtree(self._passing, ignore_errors=True)


def _locked(folder: Path) -> int:
    """A lock on a folder, which goes with its process; BlockingIOError where another has it."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _make_room(pictures: Path, but: Path) -> None:
    """Remove the oldest pictures where all together take too much."""
    folders = [each for each in pictures.iterdir() if each.is_dir() and not each.is_symlink()]
    sizes = {each: sum(file.lstat().st_size for file in each.iterdir()) for each in folders}
    total = sum(sizes.values())
    for folder in sorted(folders, key=lambda each: each.stat().st_mtime):
        if total <= _MOST_BYTES:
            return
        if folder == but:
            continue
        try:
            lock = _locked(folder)
        except OSError:
            continue  # somebody is looking at it
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        total -= sizes[folder]
