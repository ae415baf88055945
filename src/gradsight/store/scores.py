"""The score files of a run: how the ghost engine's scores are laid out, and how they are read.

A run directory holds grad_dotprods/iter_{iteration:06d}.parquet, each with the scores of the steps
before its iteration that no earlier file has. Where a writer was killed in the middle of replacing
files, two may hold the same step: then the later one counts.

A row is one sample's score for one target: the fields of `SampleScore`; then `by_parameter` with
the names in the schema's metadata under "gradsight.parameters", where scores were kept by
parameter; then `direction`, where it may be preconditioned. Millions of rows are nothing unusual,
so they are read as columns. No torch.
"""

import dataclasses
import fnmatch
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gradsight.core import limits, rundir
from gradsight.core.documents import load_json
from gradsight.core.places import names_in, read_file
from gradsight.errors import RunError, WrongPlace
from gradsight.store.parquet_footer import read_footer
from gradsight.store.score_seal import as_plain_text, footer_start, prove, read_sealed
from gradsight.values.scores import SampleScore

if TYPE_CHECKING:
    import pyarrow

_PARAMETERS = "gradsight.parameters"
BEFORE = "gradsight.before"
"""Under which a file names the one before it, beside its column of steps."""
_ALWAYS = ("step", "sample_id", "target", "score")
_COLUMNS = [field.name for field in dataclasses.fields(SampleScore)]


@dataclass(frozen=True, slots=True)
class ScoreFile:
    """Which columns a run's score files have beside those of `SampleScore`."""

    parameters: tuple[str, ...] | None = None
    """The names that `by_parameter` is in the order of; None: no such column."""
    has_direction: bool = False


def score_path(run_dir: Path, iteration: int) -> Path:
    """The file with the scores of the steps before an iteration."""
    return run_dir / rundir.SCORES / rundir.score_file(iteration)


def score_files(run_dir: Path) -> list[Path]:
    """The files of a run's scores, in the order of steps."""
    return _files_in(run_dir, rundir.SCORES)


def _files_in(root: Path, folder: str = "") -> list[Path]:
    try:
        names = fnmatch.filter(names_in(root, folder), rundir.SCORE_FILES)
    except NotADirectoryError:  # a file of that name: whoever writes says so
        return []
    return sorted([root / folder / name for name in names], key=_order)


def iteration_of(file: Path) -> int | None:
    """The iteration that a score file is named after; None for a name that is not ours."""
    digits = file.stem.removeprefix("iter_")
    return int(digits) if digits.isdecimal() else None


def _order(file: Path) -> tuple[int, str]:
    # Not by name alone: iter_1000000 comes after iter_999999.
    iteration = iteration_of(file)
    return (-1 if iteration is None else iteration, file.name)


def read_scores(run_dir: str | os.PathLike[str]) -> "pyarrow.Table":
    """Every training sample's score, as the ghost engine saved them, each step once.

    The columns are those of the files: step, sample_id, domain, target, score, lr, clip_coef; then
    by_parameter and direction where a file has them, null where another has not. Sample ids are
    numbers where all files have numbers, text otherwise.

    run_dir: a run directory, or the folder of score files itself (its grad_dotprods).
    """
    place = rundir.directory_path(run_dir, "run_dir")
    if not place.is_dir():
        raise WrongPlace(f"there is no folder at {place}: expected a run directory with scores")
    files = score_files(place) or _files_in(place)
    if not files:
        raise WrongPlace(
            f"{place} holds no scores: expected {rundir.SCORES}/{rundir.SCORE_FILES} in it. "
            "`gradsight train` and a GhostEngine with run_dir= write them"
        )
    table, unreadable = _joined(files, every_column=True)
    if unreadable:
        raise RunError(unreadable[0])
    return table


def readable_scores(run_dir: Path) -> "tuple[pyarrow.Table, list[str]]":
    """The scores of a run without its damaged files, and what to say of those.

    Each step once, with the columns that all files have.
    """
    return _joined(score_files(run_dir), every_column=False)


def each_step_once(run_dir: Path) -> "Iterator[pyarrow.Table]":
    """The scores of a run file by file, each step from the last file that has it."""
    import pyarrow

    files = score_files(run_dir)
    last_with: dict[int, int] = {}
    for number, file in enumerate(files):
        last_with.update(dict.fromkeys(np.unique(_column(file, "step")).tolist(), number))
    for number, file in enumerate(files):
        table = _typed(read_score_file(file, _COLUMNS), file)
        own = [last_with.get(step, number) == number for step in table["step"].to_pylist()]
        yield table if all(own) else table.filter(pyarrow.array(own))


def read_score_file(file: Path, columns: list[str] | None = None) -> "pyarrow.Table":
    """The rows of one file, proven whole; with columns, those alone and in that order."""
    try:
        data = read_sealed(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(file, error) from error
    return load_scores(data, str(file), columns)


def load_scores(data: bytes, name: str, columns: list[str] | None = None) -> "pyarrow.Table":
    """The rows in the bytes of a score file; `name` is what errors call it."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        texts = read_footer(data, footer_start(data)).texts
        # Texts as dictionaries: a long one that stands in every row is there once.
        source = ParquetFile(pyarrow.BufferReader(data), read_dictionary=list(texts))
        table = source.read(columns=columns, use_threads=False)
        table.validate(full=True)  # texts that are none, and indices that lead nowhere
        table = as_plain_text(table, name)
        return table if columns is None else table.select(columns)
    except (OSError, KeyError, TypeError, ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(name, error) from error


def is_sealed(file: Path) -> bool:
    """Whether a file was written with one."""
    return prove(read_file(file.parent, file.name, limits.SCORE_FILE_BYTES), str(file))


def _typed(table: "pyarrow.Table", file: Path) -> "pyarrow.Table":
    """Rows with every column of its type, and without gaps where there always is a value."""
    import pyarrow

    sample_id = pyarrow.string()
    if table.schema.field("sample_id").type == pyarrow.int64():
        sample_id = pyarrow.int64()
    try:
        typed = table.cast(score_schema(sample_id, ScoreFile()))
    except (ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(file, error) from error
    for name in _ALWAYS:
        if typed[name].null_count:
            raise RunError(f"{file} cannot be read: a row has no {name}")
    return typed


def _unreadable(file: Path | str, error: Exception) -> RunError:
    return RunError(f"{file} cannot be read: {next(iter(str(error).splitlines()), error)}")


def _joined(files: Sequence[Path], every_column: bool) -> "tuple[pyarrow.Table, list[str]]":
    """The scores of several files as one table, and what to say of those that cannot be read."""
    import pyarrow

    parts: dict[Path, pyarrow.Table] = {}
    unreadable = []
    rows = 0
    for file in files:
        try:
            part = read_score_file(file, None if every_column else _COLUMNS)
        except FileNotFoundError:
            continue  # a writer has taken it into another file meanwhile
        except RunError as error:
            unreadable.append(str(error))
            continue
        rows += len(part)
        if rows > limits.SCORE_ROWS_SHOWN and not every_column:
            text = f"from {file.name} on, scores are left out: more than"
            unreadable.append(f"{text} {limits.SCORE_ROWS_SHOWN} rows are not shown")
            break
        parts[file] = part
    schema = _common_schema([part.schema for part in parts.values()])
    tables = [schema.empty_table()]
    for file, part in parts.items():
        try:
            if not every_column:
                part = _typed(part, file)
            tables.append(_as_in(schema, part))
        except RunError as error:
            unreadable.append(str(error))
        except (KeyError, ValueError, pyarrow.ArrowException) as error:
            unreadable.append(str(_unreadable(file, error)))
    return _latest_of_each_step(tables), unreadable


def _common_schema(schemas: "Sequence[pyarrow.Schema]") -> "pyarrow.Schema":
    """The schema that the tables of all files can be brought to."""
    import pyarrow

    ids = {schema.field("sample_id").type for schema in schemas if "sample_id" in schema.names}
    sample_id = pyarrow.string()
    if ids == {pyarrow.int64()}:
        sample_id = pyarrow.int64()
    formats = [format_of(schema) for schema in schemas]
    named = [format.parameters for format in formats if format.parameters is not None]
    parameters = None
    if named:
        parameters = named[-1]
    has_direction = any(format.has_direction for format in formats)
    return score_schema(sample_id, ScoreFile(parameters, has_direction))


def _as_in(schema: "pyarrow.Schema", table: "pyarrow.Table") -> "pyarrow.Table":
    """A table with the columns of a schema, null where it has none of that name."""
    import pyarrow

    if format_of(table.schema).parameters != format_of(schema).parameters:
        # Parts of scores in the order of another model's parameters mean nothing here.
        table = table.drop_columns([name for name in table.column_names if name == "by_parameter"])
    for name in ("by_parameter", "direction"):
        if name in schema.names and name not in table.column_names:
            table = table.append_column(name, pyarrow.nulls(len(table)))
    return table.select(schema.names).cast(schema)


def _latest_of_each_step(parts: "list[pyarrow.Table]") -> "pyarrow.Table":
    """All parts as one; of a step that two hold, the later counts: a resumed run writes it anew."""
    import pyarrow

    table = pyarrow.concat_tables(parts)
    part = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
    steps, place = np.unique(table["step"].to_numpy(), return_inverse=True)
    latest = np.zeros(len(steps), dtype=np.int64)
    np.maximum.at(latest, place, part)
    kept = part == latest[place]
    return table if kept.all() else table.filter(pyarrow.array(kept))


def scored_steps(run_dir: Path) -> npt.NDArray[np.int64]:
    """The step of every sample that was scored, whatever the number of targets.

    A file that cannot be read counts as one sample of the last step that its name allows for.
    """
    steps = [np.empty(0, np.int64)]
    for file in score_files(run_dir):
        try:
            targets = _column(file, "target")
            # Every sample has one row for each target.
            steps.append(_column(file, "step")[targets == targets[:1]])
        except RunError:
            iteration = iteration_of(file)
            if iteration:
                steps.append(np.array([iteration - 1]))
    return np.concatenate(steps)


def step_after(last_recorded: int | None, run_dir: Path) -> int:
    """The step after the last that a run has recorded, or scored: the two need not go together."""
    last = -1
    if last_recorded is not None:
        last = last_recorded
    return int(scored_steps(run_dir).max(initial=last)) + 1


def _column(file: Path, name: str) -> npt.NDArray[np.int64]:
    """One column of a file, of the type that it has to have; without missing values."""
    import pyarrow

    kind = score_schema(pyarrow.string(), ScoreFile()).field(name).type
    column = read_score_file(file, [name])[name]
    try:
        return np.asarray(column.cast(kind).drop_null().to_numpy())
    except pyarrow.ArrowException as error:
        raise _unreadable(file, error) from error


def column_names(format: ScoreFile) -> list[str]:
    """The columns of such a file, in order."""
    names = list(_COLUMNS)
    if format.parameters is not None:
        names.append("by_parameter")
    if format.has_direction:
        names.append("direction")
    return names


def score_schema(sample_id: "pyarrow.DataType", format: ScoreFile) -> "pyarrow.Schema":
    """The schema of such a file, with sample ids of a type."""
    import pyarrow

    kinds: Mapping[str, pyarrow.DataType] = {
        "step": pyarrow.int64(),
        "sample_id": sample_id,
        "domain": pyarrow.string(),
        "target": pyarrow.string(),
        "score": pyarrow.float64(),
        "lr": pyarrow.float64(),
        "clip_coef": pyarrow.float64(),
        "by_parameter": pyarrow.list_(pyarrow.float64()),
        "direction": pyarrow.string(),
    }
    metadata = {}
    if format.parameters is not None:
        metadata[_PARAMETERS] = json.dumps(format.parameters)
    return pyarrow.schema(
        [(name, kinds[name]) for name in column_names(format)], metadata=metadata or None
    )


def format_of(schema: "pyarrow.Schema") -> ScoreFile:
    """The format of a file that has this schema."""
    parameters = None
    names = (schema.metadata or {}).get(_PARAMETERS.encode())
    if names is not None:
        listed = load_json(names, "the names of a score file")
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise RunError("the names of a score file are no list of texts")
        parameters = tuple(listed)
    return ScoreFile(parameters, has_direction="direction" in schema.names)
