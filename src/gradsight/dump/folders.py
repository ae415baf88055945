"""Where dumps lie, and how one becomes complete, is replaced or goes: always by a rename. No torch.

gradient_dumper/step{N}/{full,sampled}_gradients/           complete, manifest and all
gradient_dumper/step{N}.partial/{full,sampled}_gradients/   being written; never read
gradient_dumper/step{N}.partial/*.old                       replaced; put back if no newer came
gradient_dumper/step{N}.partial/*.removed                   no longer wanted; half removed, perhaps
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from gradsight.core import files, rundir
from gradsight.core.places import kind_below, names_in, refuse_links
from gradsight.dump.manifest import NAME, Manifest, read
from gradsight.errors import GradsightError, UsageError, WrongPlace

P = ParamSpec("P")
T = TypeVar("T")
NAMES = threading.RLock()
"""Held while folders come and go: two dumpers of a process may share a step's folder."""
FOLDERS = {"full": "full_gradients", "sampled": "sampled_gradients"}
_MOST_DIGITS = 18
"""Digits of a step: of a longer number Python itself would not make one."""


def _alone(method: Callable[P, T]) -> Callable[P, T]:
    """Let one such method run at a time."""

    @wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with NAMES:
            return method(*arguments, **options)

    return call


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders of one kind of dump in one run."""

    run_dir: Path
    kind: str

    @property
    def root(self) -> Path:
        """The folder of all dumps of the run."""
        return self.run_dir / rundir.DUMPS

    def final(self, step: int) -> Path:
        """Where the dump of a step lies once it is complete."""
        return self.root / f"step{step}" / FOLDERS[self.kind]

    def partial(self, step: int) -> Path:
        """Where the dump of a step is written."""
        return self.root / f"step{step}.partial" / FOLDERS[self.kind]

    @_alone
    def recover(self) -> None:
        """Clear what a killed process left; a dump that was about to be replaced is put back."""
        files.make_folder(self.root, below=self.run_dir)
        partials = step_folders(self.run_dir, rundir.DUMPS, ".partial")
        leftovers = [
            folder / name
            for folder in partials
            for name in names_in(self.run_dir, folder.relative_to(self.run_dir))
            if name.startswith(FOLDERS[self.kind])
        ]
        for leftover in leftovers:
            final = self.root / leftover.parent.name.removesuffix(".partial") / FOLDERS[self.kind]
            if leftover.suffix == ".old" and not self._is_there(final):
                self._move(leftover, final)
            self._remove(leftover)
        for folder in [*partials, *step_folders(self.run_dir, rundir.DUMPS)]:
            files.remove_if_empty(folder, below=self.run_dir)

    @_alone
    def prepare(self, step: int) -> Path:
        """An empty folder to write the dump of a step into."""
        partial = self.partial(step)
        # A dump that is overwritten half way later loads as a mix of old and new values.
        self._remove(partial)
        files.make_folder(partial, below=self.run_dir, sync=False)
        return partial

    @_alone
    def commit(self, step: int) -> None:
        """Make a written dump that of its step, in one rename; an older one goes afterwards."""
        partial = self.partial(step)
        final = self.final(step)
        old = partial.with_suffix(".old")
        # The names in the folder must be on the disk before the rename makes it the dump.
        files.sync_path(partial)
        if self._is_there(final):
            # Moved aside, not removed: killed between the two renames, `recover` puts it back.
            self._remove(old)
            self._move(final, old)
        self._move(partial, final)
        self._remove(old)
        files.remove_if_empty(partial.parent, below=self.run_dir)

    @_alone
    def discard(self, step: int) -> None:
        """Remove what was written of a dump that will not become complete."""
        self._remove(self.partial(step))
        files.remove_if_empty(self.partial(step).parent, below=self.run_dir)

    @_alone
    def retire(self, step: int) -> None:
        """Remove a complete dump: first out of sight, then from the disk."""
        final = self.final(step)
        gone = self.partial(step).with_suffix(".removed")
        self._remove(gone)
        self._move(final, gone)
        self._remove(gone)
        files.remove_if_empty(gone.parent, below=self.run_dir)
        files.remove_if_empty(final.parent, below=self.run_dir)

    def _is_there(self, folder: Path) -> bool:
        return kind_below(self.run_dir, folder.relative_to(self.run_dir)) is not None

    def _remove(self, folder: Path) -> None:
        files.remove_tree(folder, below=self.run_dir)

    def _move(self, source: Path, target: Path) -> None:
        """Rename a folder to its place in the folder of a step, which is made where it is not."""
        files.make_folder(target.parent, below=self.run_dir)
        files.move(source, target, below=self.run_dir)

    def complete(self) -> list[Manifest]:
        """The manifests of complete dumps, oldest first; unreadable ones are left alone."""
        return sorted(self.each(), key=lambda manifest: (manifest.created, manifest.step))

    def each(self, most_bytes: int | None = None) -> Iterator[Manifest]:
        """The same one by one, in the order of steps; no more than take so many bytes of text."""
        room = most_bytes
        for folder in (
            step / FOLDERS[self.kind] for step in step_folders(self.run_dir, rundir.DUMPS)
        ):
            if kind_below(self.run_dir, folder.relative_to(self.run_dir)) != "folder":
                continue
            if room is not None:
                room -= manifest_bytes(folder)
                if room < 0:
                    return
            try:
                manifest = read(folder)
            except GradsightError:
                continue
            if folder == self.final(manifest.step):
                yield manifest

    def trim(self, keep_last: int | None, max_bytes: int | None) -> list[int]:
        """Remove dumps until the limits hold, and tell whose steps; one always stays.

        The first dump of each finding is not counted by `keep_last`, and goes last of all where
        `max_bytes` is exceeded: it is the one that shows how the fault began.
        """
        if not keep_last and not max_bytes:
            return []
        dumps = self.complete()
        firsts = _first_of_findings(dumps)
        others = [manifest for manifest in dumps if manifest.step not in firsts]
        going: list[Manifest] = []
        if keep_last is not None and len(others) > keep_last:
            going = others[:-keep_last]
            others = others[-keep_last:]
        if max_bytes is not None:
            kept = [manifest for manifest in dumps if manifest.step in firsts]
            total = sum(size(manifest) for manifest in [*kept, *others])
            for manifest in [*others, *reversed(kept)][: len(kept) + len(others) - 1]:
                if total > max_bytes:
                    total -= size(manifest)
                    going.append(manifest)
        for manifest in going:
            self.retire(manifest.step)
        return [manifest.step for manifest in going]


def _first_of_findings(dumps: Sequence[Manifest]) -> set[int]:
    """The steps of the first dump of each code, of dumps in the order in which they were made."""
    first: dict[str, int] = {}
    for manifest in dumps:
        for code in manifest.codes:
            first.setdefault(code, manifest.step)
    return set(first.values())


def manifest_bytes(folder: Path) -> int:
    """How long the text of a dump's manifest is; 0 where there is none."""
    try:
        return os.lstat(folder / NAME).st_size
    except OSError:
        return 0


def size(manifest: Manifest) -> int:
    """The bytes that the files of a dump take."""
    return sum(stored.bytes for stored in manifest.files.values())


def find_dumps(path: Path, step: int | None = None) -> list[Path]:
    """The dump folders under a run, its gradient_dumper, a step or a dump, in the order of steps.

    Every folder that has the place of a dump is named, readable or not; folders still being written
    are not.
    """
    if not path.is_dir():
        raise WrongPlace(_nothing(path))
    if kind_below(path, NAME) == "file" or path.name in FOLDERS.values():
        dumps = [path]
    else:
        refuse_links(path, rundir.DUMPS)
        parents = [path, *step_folders(path), *step_folders(path, rundir.DUMPS)]
        places = [folder / name for folder in parents for name in FOLDERS.values()]
        dumps = [place for place in places if _is_folder(path, place)]
    if not dumps:
        raise WrongPlace(_nothing(path))
    dumps.sort(key=lambda folder: (step_of(folder) or 0, folder.name))
    chosen = [folder for folder in dumps if step is None or step_of(folder) == step]
    if not chosen:
        numbers = sorted({step_of(folder) or 0 for folder in dumps})
        steps = ", ".join(str(number) for number in numbers)
        raise UsageError(f"{path} has no dump of step {step}; it has steps {steps}")
    return chosen


def step_folders(root: Path, inner: str = "", ending: str = "") -> list[Path]:
    """The folders of steps in a folder below `root`, while others may be coming and going.

    What is no folder, or a link to one, is none.
    """
    if inner and kind_below(root, inner) != "folder":
        return []
    pattern = rf"step[0-9]{{1,{_MOST_DIGITS}}}{re.escape(ending)}"
    names = [name for name in names_in(root, inner) if re.fullmatch(pattern, name)]
    folders = [Path(inner, name) for name in sorted(names, key=lambda name: (len(name), name))]
    return [root / folder for folder in folders if kind_below(root, folder) == "folder"]


def _is_folder(root: Path, place: Path) -> bool:
    """Whether there is a folder at a place; a link there is an error."""
    inner = place.relative_to(root)
    refuse_links(root, inner)
    return kind_below(root, inner) == "folder"


def step_of(folder: Path) -> int | None:
    """The step in a dump folder's path."""
    match = re.fullmatch(rf"step([0-9]{{1,{_MOST_DIGITS}}})", folder.parent.name)
    return int(match[1]) if match else None


def _nothing(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist"
    expected = f"{rundir.DUMPS}/step{{N}}/full_gradients or sampled_gradients"
    return f"{path} holds no gradient dump; expected {expected} in it"
