"""The score files of a run: how the ghost engine's scores are laid out, written and read.

A run directory holds grad_dotprods/iter_{iteration:06d}.parquet, each with the scores of the steps
before its iteration that no earlier file has. A row is one sample's score for one target: the
fields of `SampleScore`; then `by_parameter` with the names in the schema's metadata under
"gradsight.parameters", where scores were kept by parameter; then `direction`, where it may be
preconditioned. Millions of rows are nothing unusual, so they are read as columns. No torch.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsight.core import rundir
from gradsight.core.files import whole_file
from gradsight.errors import GradsightError, RunError
from gradsight.values.scores import SampleScore, SavedScore

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
    return sorted((run_dir / rundir.SCORES).glob(rundir.SCORE_FILES))


def write_scores(path: Path, rows: Sequence[SavedScore], format: ScoreFile) -> str | None:
    """Write a file, complete or not at all; of an earlier one of this name, other steps stay.

    Returns what to say of an earlier file that cannot be read and was put aside.
    """
    import pyarrow

    steps = {row.step for row in rows}
    new = [{name: getattr(row, name) for name in _names(format)} for row in rows]
    old, fault = _rows_in(path)
    merged = [row for row in old if row["step"] not in steps] + new
    sample_id = pyarrow.int64()
    if not all(isinstance(row["sample_id"], int) for row in merged):
        sample_id = pyarrow.string()
        merged = [{**row, "sample_id": str(row["sample_id"])} for row in merged]
    table = pyarrow.Table.from_pylist(merged, schema=_schema(sample_id, format))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(path, table)
    except OSError as error:
        raise GradsightError(f"the scores could not be written to {path}: {error}") from error
    return fault


def forget_scores(run_dir: Path, step: int) -> None:
    """Remove the scores of this step and of all later ones: a resumed run makes them again."""
    import pyarrow.compute
    import pyarrow.parquet

    for file in score_files(run_dir):
        table = pyarrow.parquet.read_table(file)
        kept = table.filter(pyarrow.compute.field("step") < step)
        if kept.num_rows == 0:
            file.unlink()
        elif kept.num_rows < table.num_rows:
            _write(file, kept)


def read_scores(file: Path, schema: "pyarrow.Schema | None" = None) -> "pyarrow.Table":
    """The rows of one file; with a schema, as that says."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file).read(columns=_COLUMNS).select(_COLUMNS)
        return table if schema is None else table.cast(schema)
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise RunError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def all_scores(run_dir: Path) -> "tuple[pyarrow.Table, list[str]]":
    """All scores of a run, each step once, and what to say of files that cannot be read."""
    import pyarrow

    # Sample ids are text, whatever they were, so that all files agree.
    schema = _schema(pyarrow.string(), ScoreFile())
    parts = [schema.empty_table()]
    unreadable = []
    for file in score_files(run_dir):
        try:
            parts.append(read_scores(file, schema))
        except RunError as error:
            unreadable.append(str(error))
    return _each_step_once(parts), unreadable


def _each_step_once(parts: "list[pyarrow.Table]") -> "pyarrow.Table":
    """All parts as one; of a step that two hold, the later counts: a resumed run writes it anew."""
    import numpy as np
    import pyarrow

    table = pyarrow.concat_tables(parts)
    part = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
    steps, place = np.unique(table["step"].to_numpy(), return_inverse=True)
    latest = np.zeros(len(steps), dtype=np.int64)
    np.maximum.at(latest, place, part)
    kept = part == latest[place]
    return table if kept.all() else table.filter(pyarrow.array(kept))


def _write(path: Path, table: "pyarrow.Table") -> None:
    import pyarrow.parquet

    with whole_file(path, path.with_suffix(".partial")) as partial:
        pyarrow.parquet.write_table(table, partial)


def _rows_in(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of an earlier file of this name; one that cannot be read is put aside."""
    import pyarrow.parquet

    if not path.exists():
        return [], None
    try:
        return pyarrow.parquet.read_table(path).to_pylist(), None
    except (pyarrow.ArrowException, OSError) as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        return [], f"{path} cannot be read ({error}); it is now {aside.name}"


def _names(format: ScoreFile) -> list[str]:
    """The columns of such a file, in order."""
    names = list(_COLUMNS)
    if format.parameters is not None:
        names.append("by_parameter")
    if format.has_direction:
        names.append("direction")
    return names


def _schema(sample_id: "pyarrow.DataType", format: ScoreFile) -> "pyarrow.Schema":
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
        [(name, kinds[name]) for name in _names(format)], metadata=metadata or None
    )
