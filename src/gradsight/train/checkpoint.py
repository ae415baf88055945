"""Checkpoints on disk: complete or not there at all, with checksums. No torch at import.

checkpoints/step_{N}/
    tensors.safetensors    parameters, the optimizer's state, every process's random generators
    checkpoint.json        a document (`core.documents`): how far the run had come, and the bytes
                           and the checksum of the tensors; without these two it is an older one

Safetensors and JSON, no pickle.
"""

import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

from gradsight.core import rundir
from gradsight.core.documents import document_text, read_document
from gradsight.core.files import whole_folder
from gradsight.core.places import kind_below, names_in, open_file, refuse_links, remove_below
from gradsight.errors import RunError
from gradsight.train.training_log import find_log_damage
from gradsight.values.findings import Damage
from gradsight.values.whole_numbers import LARGEST

if TYPE_CHECKING:
    from torch import Tensor

_TENSORS = "tensors.safetensors"
_FACTS = "checkpoint.json"
_COMPLETE = re.compile(r"step_[0-9]{6,19}")
_LEFTOVER = re.compile(r"(old-)?partial_step_[0-9]+")
_BLOCK = 1 << 22
_MOST_PROCESSES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """How far a run had come."""

    step: int
    """Steps made, in all."""
    position: int
    """Samples used, in all."""
    seconds: float
    """Time spent, in all."""
    data: str
    """The fingerprint of the data."""
    processes: int | None = None
    """How many had a random generator; None in checkpoints that did not say so yet."""


def checkpoint_names(run_dir: Path) -> list[str]:
    """The folders of all checkpoints, newest first; an error where they are behind a link."""
    try:
        names = names_in(run_dir, rundir.CHECKPOINTS)
    except OSError as error:
        place = run_dir / rundir.CHECKPOINTS
        raise RunError(f"{place} cannot be read: {error.strerror}") from error
    return sorted(filter(_COMPLETE.fullmatch, names), key=_step, reverse=True)


def newest(run_dir: Path) -> Path | None:
    """The checkpoint of the latest step; None where there is none."""
    folders = [run_dir / rundir.CHECKPOINTS / name for name in checkpoint_names(run_dir)]
    return next((folder for folder in folders if (folder / _FACTS).is_file()), None)


def is_leftover(name: str) -> bool:
    """Whether this is what a writer has left that was killed."""
    return _LEFTOVER.fullmatch(name) is not None


def read_facts(run_dir: Path, name: str) -> CheckpointFacts:
    """What a checkpoint says of itself, once its files are seen to be as they were written.

    Where they are not, the error says so: *damaged*, and which checkpoint.
    """
    damage = _find_damage(run_dir, name)
    if damage is not None:
        raise damaged_checkpoint(name, f"{PurePath(damage.path).name}: {damage.what}")
    return _facts_in(_read(run_dir, name))


def damaged_checkpoint(name: str, what: str) -> RunError:
    """The error for a checkpoint that cannot be gone on from."""
    return RunError(f"the checkpoint {name} is damaged and cannot be read: {what}")


def tensors_file(run_dir: Path, name: str) -> Path:
    """Where a checkpoint's tensors are; an error where a link is on the way."""
    return refuse_links(run_dir, PurePath(rundir.CHECKPOINTS, name, _TENSORS))


def verify_checkpoints(run_dir: Path) -> list[Damage]:
    """The files of the trainer that are not as they were written. Reads all of them."""
    try:
        names = checkpoint_names(run_dir)
    except RunError as error:
        return [Damage(rundir.CHECKPOINTS, str(error))]
    found = [find_log_damage(run_dir)]
    for name in reversed(names):
        damage = _find_damage(run_dir, name)
        # Asked afterwards: a training that goes on may have removed it meanwhile.
        if name in checkpoint_names(run_dir):
            found.append(damage)
    return [damage for damage in found if damage is not None]


def without_checksums(run_dir: Path) -> list[str]:
    """The intact checkpoints that were written before there were checksums."""
    names = [] if kind_below(run_dir, rundir.CHECKPOINTS) == "link" else checkpoint_names(run_dir)
    return [
        name
        for name in reversed(names)
        if _find_damage(run_dir, name) is None and "tensors" not in _read(run_dir, name)
    ]


def write(
    run_dir: Path, tensors: Mapping[str, "Tensor"], facts: CheckpointFacts, keep: int
) -> None:
    """Write a checkpoint; afterwards the oldest beyond `keep` go, and what killed runs have left.

    So do those of later steps: they are of a course that training has left by going back.
    """
    name = rundir.checkpoint_folder(facts.step)
    folder = refuse_links(run_dir, PurePath(rundir.CHECKPOINTS, name))
    refuse_links(run_dir, PurePath(rundir.CHECKPOINTS))
    with whole_folder(folder, below=run_dir) as partial:
        _write_files(partial, tensors, facts)
    earlier = [other for other in checkpoint_names(run_dir) if _step(other) <= facts.step]
    kept = set(earlier[:keep])
    for other in names_in(run_dir, rundir.CHECKPOINTS):
        is_old = _COMPLETE.fullmatch(other) and other not in kept
        if is_old or is_leftover(other):
            remove_below(run_dir, PurePath(rundir.CHECKPOINTS, other))


def _write_files(folder: Path, tensors: Mapping[str, "Tensor"], facts: CheckpointFacts) -> None:
    from safetensors.torch import save_file

    document = folder / _FACTS
    document.touch()
    save_file(dict(tensors), folder / _TENSORS)
    # safetensors writes for its owner's eyes only; the user's umask decides, as of any file.
    (folder / _TENSORS).chmod(document.stat().st_mode & 0o777)
    with open(folder / _TENSORS, "rb") as opened:
        checksum = _checksum(opened)
    body = {
        "step": facts.step,
        "position": facts.position,
        "seconds": facts.seconds,
        "data": facts.data,
        "processes": facts.processes,
        "tensors": {"bytes": (folder / _TENSORS).stat().st_size, "checksum": checksum},
    }
    document.write_text(document_text(body))


def _read(run_dir: Path, name: str) -> dict[str, Any]:
    return read_document(run_dir, PurePath(rundir.CHECKPOINTS, name, _FACTS))


def _find_damage(run_dir: Path, name: str) -> Damage | None:
    """What is wrong with a checkpoint's files, the first of it."""
    folder = PurePath(rundir.CHECKPOINTS, name)
    try:
        body = _read(run_dir, name)
        facts = _facts_in(body)
    except RunError as error:
        return Damage(str(folder / _FACTS), str(error))
    if _step(name) != facts.step:
        what = f"it says step {facts.step}, in the folder {name}"
        return Damage(str(folder / _FACTS), what)
    tensors = folder / _TENSORS
    try:
        difference = _difference(open_file(run_dir, tensors), body.get("tensors"))
    except (OSError, RunError) as error:
        return Damage(str(tensors), str(error))
    return None if difference is None else Damage(str(tensors), difference)


def _facts_in(body: Mapping[str, Any]) -> CheckpointFacts:
    """The facts in a document, of the types that they must have."""
    seconds = body.get("seconds")
    data = body.get("data")
    processes = body.get("processes")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise RunError(f"seconds should be a number, and is {seconds!r:.80}")
    if not math.isfinite(seconds) or seconds < 0:
        raise RunError(f"seconds should be 0 or more, and is {seconds!r:.80}")
    if not isinstance(data, str):
        raise RunError(f"data should be a fingerprint, and is {data!r:.80}")
    if processes is not None:
        processes = _whole(body, "processes", least=1, most=_MOST_PROCESSES)
    return CheckpointFacts(
        _whole(body, "step"), _whole(body, "position"), float(seconds), data, processes
    )


def _whole(body: Mapping[str, Any], name: str, least: int = 0, most: int = LARGEST) -> int:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RunError(
            f"{name} should be a whole number from {least} to {most}, and is {value!r:.80}"
        )
    return value


def _difference(handle: int, written: object) -> str | None:
    """How an open file differs from what was written; closes it."""
    with os.fdopen(handle, "rb") as opened:
        # Checkpoints of before there were checksums are taken as they are.
        if written is None:
            return None
        if not isinstance(written, dict):
            return f"its checksum should be known, but is {written!r:.80}"
        size = os.fstat(handle).st_size
        # Before it is read: a file that somebody has made huge would take long.
        if size != written.get("bytes"):
            return f"it has {size:,} bytes, and {written.get('bytes')!r:.20} were written"
        checksum = _checksum(opened)
        if checksum != written.get("checksum"):
            return f"its checksum is {checksum}, not {written.get('checksum')!r:.30}"
        return None


def _checksum(opened: BinaryIO) -> str:
    checksum = 0
    while block := opened.read(_BLOCK):
        checksum = zlib.crc32(block, checksum)
    return f"crc32:{checksum:08x}"


def _step(name: str) -> int:
    return int(name.removeprefix("step_"))
