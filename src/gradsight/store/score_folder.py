"""The folder of a run's score files, open for writing: by one engine at a time, in one process.

A file is replaced by a whole one, and others whose steps it holds are removed afterwards: whoever
is killed in between leaves a step in two files, of which readers take the later. A pickle that
stands beside a file goes with it: it holds the same rows or is not there.
"""

import contextlib
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsight.core import rundir
from gradsight.core.file_locks import lock_alone, unlock_and_close
from gradsight.core.files import make_folder, remove_abandoned, whole_file
from gradsight.core.places import open_folder
from gradsight.errors import GradsightError, RunError, UsageError
from gradsight.store.score_pickle import remove_pickle, write_pickle
from gradsight.store.score_seal import sealed
from gradsight.store.scores import (
    BEFORE,
    ScoreFile,
    column_names,
    format_of,
    iteration_of,
    read_score_file,
    score_files,
    score_path,
    score_schema,
)
from gradsight.values.scores import SavedScore

if TYPE_CHECKING:
    import pyarrow


class ScoreFolder:
    """The score files of a run, from a first step on; `close` lets others write."""

    def __init__(
        self, run_dir: Path, first_step: int, interval: int, pickles: bool = False
    ) -> None:
        """Make the folder this writer's own.

        interval: how many steps go into a file. A file that an earlier writer ended in the middle
        of an interval is taken into the first that is written here, as if nothing had happened.
        pickles: whether each file gets a pickle of the same columns beside it.
        """
        self.run_dir = run_dir
        self._first_step = first_step
        self._interval = interval
        self._pickles = pickles
        self._written = False
        self._unlock = None
        lock = _lock(run_dir)
        if lock is not None:
            # An engine that was dropped without close() must not lock out the next one.
            self._unlock = weakref.finalize(self, unlock_and_close, lock)
            # When the process ends, the system unlocks; a forked child must not.
            self._unlock.atexit = False

    def forget_from(self, step: int) -> list[str]:
        """Remove the scores of this step and of all later ones, as `forget_scores` does."""
        return forget_scores(self.run_dir, step)

    def write(self, iteration: int, rows: Sequence[SavedScore], format: ScoreFile) -> list[str]:
        """Write the file of an iteration; returns what to say of what went wrong beside it."""
        path = score_path(self.run_dir, iteration)
        unfinished: list[Path] = []
        if not self._written:
            unfinished = self._unfinished_files()
        faults = write_scores(path, rows, format, unfinished)
        if self._pickles:
            # At first also those of files that an earlier writer left without one.
            files = [path] if self._written else score_files(self.run_dir)
            faults += [fault for file in files if (fault := write_pickle(file))]
        self._written = True
        return faults

    def _unfinished_files(self) -> list[Path]:
        """The files that end inside of the interval that the first step is in."""
        begun = self._first_step - self._first_step % self._interval
        files = score_files(self.run_dir)
        return [file for file in files if begun < (iteration_of(file) or 0) <= self._first_step]

    def close(self) -> None:
        """Let others write. Again: does nothing."""
        if self._unlock is not None:
            self._unlock()


def write_scores(
    path: Path, rows: Sequence[SavedScore], format: ScoreFile, joined: Sequence[Path] = ()
) -> list[str]:
    """Write a file, complete or not at all; of an earlier one of this name, other steps stay.

    joined: files of the same format whose steps go into this one; they are removed.
    Returns what to say of earlier files that cannot be read and were put aside.
    """
    names = column_names(format)
    new = [{name: getattr(row, name) for name in names} for row in rows]
    return _replace(path, new, format, joined)


def forget_scores(run_dir: Path, step: int) -> list[str]:
    """Remove the scores of this step and of all later ones: a resumed run makes them again.

    Returns what to say of files that cannot be read and were put aside.
    """
    import pyarrow.compute

    faults = []
    # The last file first: whoever is killed in between leaves a run that ends earlier.
    for file in reversed(score_files(run_dir)):
        if (iteration_of(file) or 0) <= step:
            continue
        table, fault = _read_or_put_aside(file)
        if fault is not None:
            faults.append(fault)
        if table is None:
            continue
        kept = table.filter(pyarrow.compute.field("step") < step)
        if kept.num_rows:
            # What is left of a file ends with another step, and is named after that.
            path = score_path(run_dir, step)
            faults += _replace(path, kept.to_pylist(), format_of(kept.schema), ())
        _remove(file)
    return faults


def _replace(
    path: Path, new: list[dict[str, Any]], format: ScoreFile, joined: Sequence[Path]
) -> list[str]:
    steps = {row["step"] for row in new}
    faults = []
    rows: list[dict[str, Any]] = []
    gone = []
    for file in joined:
        # One that cannot be read is left alone: readers say so.
        with contextlib.suppress(RunError):
            table = _whole_table(file)
            if file != path and format_of(table.schema) == format:
                rows += _as_rows(table, format)
                gone.append(file)
    earlier, fault = _read_or_put_aside(path)
    if fault is not None:
        faults.append(fault)
    if earlier is not None:
        rows += _as_rows(earlier, format)
    rows = [row for row in rows if row["step"] not in steps]
    _write(path, _as_table(rows + new, format), _before(path, gone))
    for file in gone:
        _remove(file)
    return faults


def _as_rows(table: "pyarrow.Table", format: ScoreFile) -> list[dict[str, Any]]:
    """The rows of an earlier file as a file of this format has them."""
    rows: list[dict[str, Any]] = table.to_pylist()
    if format_of(table.schema).parameters != format.parameters:
        # Parts of scores in the order of another model's parameters mean nothing here.
        rows = [{**row, "by_parameter": None} for row in rows]
    return rows


def _as_table(rows: list[dict[str, Any]], format: ScoreFile) -> "pyarrow.Table":
    import pyarrow

    sample_id = pyarrow.int64()
    if not all(isinstance(row["sample_id"], int) for row in rows):
        sample_id = pyarrow.string()
        rows = [{**row, "sample_id": str(row["sample_id"])} for row in rows]
    return pyarrow.Table.from_pylist(rows, schema=score_schema(sample_id, format))


def _remove(file: Path) -> None:
    remove_pickle(file)
    file.unlink()


def _before(path: Path, gone: Sequence[Path]) -> str:
    """The name of the file before a new one, which a reader will miss if it is gone."""
    own = iteration_of(path) or 0
    earlier = [
        file.name
        for file in score_files(path.parents[1])
        if file not in gone and (iteration_of(file) or 0) < own
    ]
    return earlier[-1] if earlier else ""


def _write(path: Path, table: "pyarrow.Table", before: str) -> None:
    import pyarrow
    import pyarrow.parquet

    place = table.schema.get_field_index("step")
    steps = table.schema.field(place).with_metadata({BEFORE: before})
    table = table.cast(table.schema.set(place, steps))
    buffer = pyarrow.BufferOutputStream()
    try:
        pyarrow.parquet.write_table(table, buffer)
        make_folder(path.parent, below=path.parents[1])
        remove_pickle(path)
        with whole_file(path, below=path.parents[1]) as partial:
            partial.write_bytes(sealed(buffer.getvalue().to_pybytes()))
    except OSError as error:
        raise GradsightError(f"the scores could not be written to {path}: {error}") from error


def _read_or_put_aside(path: Path) -> "tuple[pyarrow.Table | None, str | None]":
    """An earlier file, if there is one; one that cannot be read is put aside."""
    if not path.exists():
        return None, None
    try:
        return _whole_table(path), None
    except RunError as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        return None, f"{error}; it is now {aside.name}"


def _whole_table(path: Path) -> "pyarrow.Table":
    """All columns of a file that has those of scores; an error for any other."""
    import pyarrow

    schema = score_schema(pyarrow.string(), ScoreFile())
    table = read_score_file(path)
    try:
        table.select(schema.names).cast(schema)
    except (KeyError, pyarrow.ArrowException) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    return table


def _lock(run_dir: Path) -> int | None:
    """Lock the folder against other writers, until the process ends; None where it cannot be."""
    folder = run_dir / rundir.SCORES
    try:
        make_folder(folder, below=run_dir)
        with open_folder(run_dir, rundir.SCORES) as opened:
            handle = os.dup(opened)
    except OSError:
        return None  # writing will say why
    try:
        lock_alone(handle)
        remove_abandoned(folder)
    except BlockingIOError as error:
        os.close(handle)
        raise UsageError(
            f"another GhostEngine, of this process or of another, writes scores into {folder}: "
            "close() it first, give this one a run_dir of its own, or give one engine all targets"
        ) from error
    except OSError:
        pass  # a file system that refuses it in ways of its own
    return handle
