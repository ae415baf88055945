"""Where dumps lie, and how one becomes complete, is replaced or goes: always by a rename. No torch.

gradient_dumper/step{N}/{full,sampled}_gradients/           complete, manifest and all
gradient_dumper/step{N}.partial/{full,sampled}_gradients/   being written; never read
gradient_dumper/step{N}.partial/*.old                       replaced; put back if no newer came
gradient_dumper/step{N}.partial/*.removed                   no longer wanted; half removed, perhaps
"""

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from gradsight.core import files, rundir
from gradsight.dump.manifest import NAME, Manifest, read
from gradsight.errors import GradsightError, UsageError, WrongPlace

P = ParamSpec("P")
T = TypeVar("T")
NAMES = threading.Lock()
"""Held while folders come and go: two dumpers of a process may share a step's folder."""
FOLDERS = {"full": "full_gradients", "sampled": "sampled_gradients"}


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
        files.make_folder(self.root)
        partials = step_folders(self.root, ".partial")
        leftovers = [
            path for folder in partials for path in sorted(folder.glob(f"{FOLDERS[self.kind]}*"))
        ]
        for leftover in leftovers:
            final = self.root / leftover.parent.name.removesuffix(".partial") / FOLDERS[self.kind]
            if leftover.suffix == ".old" and not final.exists():
                final.parent.mkdir(exist_ok=True)
                files.move(leftover, final)
            files.remove_tree(leftover)
        for folder in [*partials, *step_folders(self.root)]:
            files.remove_if_empty(folder)

    @_alone
    def prepare(self, step: int) -> Path:
        """An empty folder to write the dump of a step into."""
        partial = self.partial(step)
        # A dump that is overwritten half way later loads as a mix of old and new values.
        files.remove_tree(partial)
        partial.mkdir(parents=True)
        return partial

    @_alone
    def commit(self, step: int) -> None:
        """Make a written dump that of its step, in one rename; an older one goes afterwards."""
        partial = self.partial(step)
        final = self.final(step)
        old = partial.with_suffix(".old")
        # The names in the folder must be on the disk before the rename makes it the dump.
        files.sync_path(partial)
        final.parent.mkdir(exist_ok=True)
        if final.exists():
            # Moved aside, not removed: killed between the two renames, `recover` puts it back.
            files.remove_tree(old)
            files.move(final, old)
        files.move(partial, final)
        files.sync_path(self.root)
        files.remove_tree(old)
        files.remove_if_empty(partial.parent)

    @_alone
    def discard(self, step: int) -> None:
        """Remove what was written of a dump that will not become complete."""
        files.remove_tree(self.partial(step))
        files.remove_if_empty(self.partial(step).parent)

    @_alone
    def retire(self, step: int) -> None:
        """Remove a complete dump: first out of sight, then from the disk."""
        final = self.final(step)
        gone = self.partial(step).with_suffix(".removed")
        gone.parent.mkdir(exist_ok=True)
        files.remove_tree(gone)
        files.move(final, gone)
        files.remove_tree(gone)
        files.remove_if_empty(gone.parent)
        files.remove_if_empty(final.parent)

    def complete(self) -> list[Manifest]:
        """The manifests of complete dumps, oldest first; unreadable ones are left alone."""
        manifests = []
        for folder in (step / FOLDERS[self.kind] for step in step_folders(self.root)):
            try:
                manifest = read(folder)
            except GradsightError:
                continue
            if folder == self.final(manifest.step):
                manifests.append(manifest)
        return sorted(manifests, key=lambda manifest: (manifest.created, manifest.step))

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


def size(manifest: Manifest) -> int:
    """The bytes that the files of a dump take."""
    return sum(stored.bytes for stored in manifest.files.values())


def find_dumps(path: Path, step: int | None = None) -> list[Path]:
    """The dump folders under a run, its gradient_dumper, a step or a dump, in the order of steps.

    Every folder that has the place of a dump is named, readable or not; folders still being written
    are not.
    """
    if (path / NAME).exists() or path.name in FOLDERS.values():
        dumps = [path]
    else:
        parents = [path, *step_folders(path), *step_folders(path / rundir.DUMPS)]
        places = [folder / name for folder in parents for name in FOLDERS.values()]
        dumps = [place for place in places if place.is_dir()]
    if not dumps or not path.exists():
        raise WrongPlace(_nothing(path))
    dumps.sort(key=lambda folder: (step_of(folder) or 0, folder.name))
    chosen = [folder for folder in dumps if step is None or step_of(folder) == step]
    if not chosen:
        numbers = sorted({step_of(folder) or 0 for folder in dumps})
        steps = ", ".join(str(number) for number in numbers)
        raise UsageError(f"{path} has no dump of step {step}; it has steps {steps}")
    return chosen


def step_folders(root: Path, ending: str = "") -> list[Path]:
    """The folders of steps, while others may be coming and going."""
    names = os.listdir(root) if root.is_dir() else []
    return [root / name for name in names if re.fullmatch(rf"step\d+{re.escape(ending)}", name)]


def step_of(folder: Path) -> int | None:
    """The step in a dump folder's path."""
    match = re.fullmatch(r"step(\d+)", folder.parent.name)
    return int(match[1]) if match else None


def _nothing(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist"
    expected = f"{rundir.DUMPS}/step{{N}}/full_gradients or sampled_gradients"
    return f"{path} holds no gradient dump; expected {expected} in it"
