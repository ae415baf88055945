"""gradsight verify RUN_DIR"""

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated

from cyclopts import Parameter

from gradsight.core import rundir
from gradsight.core.places import kind_below, names_in
from gradsight.dump.folders import FOLDERS
from gradsight.dump.verify import verify as verify_dump
from gradsight.errors import WrongPlace
from gradsight.show.text import json_text
from gradsight.store.verify import (
    Verified,
    verify_documents,
    verify_incidents,
    verify_record,
    verify_scores,
)
from gradsight.train.checkpoint import verify_checkpoints, without_checksums
from gradsight.values.findings import Damage
from gradsight.values.plain import counted, plain
from gradsight.values.texts import on_one_line

DAMAGED = 2
_PARTS = (
    rundir.RECORD,
    rundir.CONFIG,
    rundir.DUMPS,
    rundir.SCORES,
    rundir.INCIDENTS,
    rundir.CHECKPOINTS,
    rundir.TRAINING_LOG,
)
"""Any of these makes a folder one of ours."""


def verify(
    run_dir: Path,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Read every byte of a run directory and compare checksums; nothing is written.

    Covers the record and its tail, config.json, dumps, scores, incidents, and the trainer's
    checkpoints and log. A run that was killed is intact, and so is one that is being written.

    Exits with 0 if all is intact, 2 if something is damaged, 64 for wrong usage, a missing folder
    among it.

    Parameters
    ----------
    run_dir
        A directory that `gradsight.watch(..., run_dir=...)` or `gradsight train` has written.
    as_json
        Print one JSON object instead.
    """
    runs = _runs_in(run_dir)
    damaged: list[Damage] = []
    notes: list[str] = []
    for place in runs:
        prefix = "" if place == run_dir else f"{place.name}/"
        for each in _verified(place):
            if isinstance(each, Damage):
                damaged.append(Damage(prefix + each.path, each.what))
            else:
                notes.append(prefix + each)
    if as_json:
        print(json_text(_as_object(run_dir, damaged, notes)))
    else:
        for line in _lines(run_dir, damaged, notes):
            print(on_one_line(line))
    return DAMAGED if damaged else 0


def _runs_in(run_dir: Path) -> list[Path]:
    """The run, and those of a script's other models inside it."""
    if not run_dir.is_dir():
        raise WrongPlace(f"there is no run directory at {run_dir}")
    present = names_in(run_dir)
    inner = [name for name in present if kind_below(run_dir, Path(name, rundir.RECORD)) == "file"]
    if not inner and not set(present) & set(_PARTS):
        raise WrongPlace(f"{run_dir} is not a run directory: it has none of {', '.join(_PARTS)}")
    return [run_dir, *[run_dir / name for name in inner]]


def _verified(run_dir: Path) -> Iterator[Verified]:
    present = names_in(run_dir)
    if rundir.RECORD in present:
        yield from verify_record(run_dir)
    elif rundir.TAIL in present:
        yield Damage(rundir.RECORD, "is missing, and its tail alone is no run")
    yield from verify_documents(run_dir)
    yield from verify_scores(run_dir)
    yield from verify_incidents(run_dir)
    yield from verify_checkpoints(run_dir)
    for name in without_checksums(run_dir):
        yield f"{rundir.CHECKPOINTS}/{name} has no checksums: an older version wrote it"
    if kind_below(run_dir, rundir.DUMPS) == "link":
        yield Damage(rundir.DUMPS, "is a link, and links inside a run are not followed")
    elif rundir.DUMPS in present:
        yield from _verified_dumps(run_dir)


def _verified_dumps(run_dir: Path) -> Iterator[Verified]:
    steps = [PurePath(rundir.DUMPS, name) for name in names_in(run_dir, rundir.DUMPS)]
    for place in (step / name for step in steps for name in ("", *FOLDERS.values())):
        kind = kind_below(run_dir, place)
        if kind == "link":
            yield Damage(str(place), "is a link, and links inside a run are not followed")
        # Also asked afterwards: `keep_last` may remove a dump while it is read.
        if kind != "folder" or place.name not in FOLDERS.values():
            continue
        found = verify_dump(run_dir / place).damage
        if kind_below(run_dir, place) == "folder":
            yield from (Damage(str(place), what) for what in found)


def _lines(run_dir: Path, damaged: list[Damage], notes: list[str]) -> Iterator[str]:
    for note in notes:
        yield f"note: {note}"
    for damage in damaged:
        yield f"damaged: {damage.path}: {damage.what}"
    if damaged:
        files = len({damage.path for damage in damaged})
        yield f"{run_dir}: {counted(files, 'file')} damaged"
    else:
        yield f"{run_dir}: all intact"


def _as_object(run_dir: Path, damaged: list[Damage], notes: list[str]) -> dict[str, object]:
    return {
        "run_dir": str(run_dir),
        "status": "damaged" if damaged else "intact",
        "damaged": plain(damaged),
        "notes": notes,
    }
