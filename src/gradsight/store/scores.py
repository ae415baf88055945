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
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gradsight.core import rundir
from gradsight.errors import RunError
from gradsight.values.scores import SampleScore

if TYPE_CHECKING:
    import pyarrow

_PARAMETERS = "gradsight.parameters"
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
    return sorted((run_dir / rundir.SCORES).glob(rundir.SCORE_FILES), key=_order)


def iteration_of(file: Path) -> int | None:
    """The iteration that a score file is named after; None for a name that is not ours."""
    digits = file.stem.removeprefix("iter_")
    return int(digits) if digits.isdecimal() else None


def _order(file: Path) -> tuple[int, str]:
    # Not by name alone: iter_1000000 comes after iter_999999.
    iteration = iteration_of(file)
    return (-1 if iteration is None else iteration, file.name)


def read_scores(file: Path, schema: "pyarrow.Schema | None" = None) -> "pyarrow.Table":
    """The rows of one file; with a schema, as that says."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file).read(columns=_COLUMNS).select(_COLUMNS)
        return table if schema is None else table.cast(schema)
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise RunError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def each_step_once(run_dir: Path) -> "Iterator[pyarrow.Table]":
    """The scores of a run file by file, each step from the last file that has it."""
    import pyarrow

    files = score_files(run_dir)
    last_with: dict[int, int] = {}
    for number, file in enumerate(files):
        last_with.update(dict.fromkeys(np.unique(_column(file, "step")).tolist(), number))
    for number, file in enumerate(files):
        table = read_scores(file)
        own = [last_with.get(step, number) == number for step in table["step"].to_pylist()]
        yield table if all(own) else table.filter(pyarrow.array(own))


def all_scores(run_dir: Path) -> "tuple[pyarrow.Table, list[str]]":
    """All scores of a run, each step once, and what to say of files that cannot be read."""
    import pyarrow

    # Sample ids are text, whatever they were, so that all files agree.
    schema = score_schema(pyarrow.string(), ScoreFile())
    parts = [schema.empty_table()]
    unreadable = []
    for file in score_files(run_dir):
        try:
            parts.append(read_scores(file, schema))
        except RunError as error:
            unreadable.append(str(error))
    return _latest_of_each_step(parts), unreadable


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
    from pyarrow.parquet import ParquetFile

    kind = score_schema(pyarrow.string(), ScoreFile()).field(name).type
    try:
        column = ParquetFile(file).read(columns=[name])[name].cast(kind).drop_null()
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise RunError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    return np.asarray(column.to_numpy())


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
        parameters = tuple(json.loads(names))
    return ScoreFile(parameters, has_direction="direction" in schema.names)
