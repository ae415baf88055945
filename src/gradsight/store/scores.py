"""The scores that the ghost engine saved, as columns: millions of rows are nothing unusual here. No
torch.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsight.core import rundir
from gradsight.errors import RunError
from gradsight.values.scores import SampleScore

if TYPE_CHECKING:
    import pyarrow

_NAMES = [field.name for field in dataclasses.fields(SampleScore)]


def score_files(run_dir: Path) -> list[Path]:
    """The files of a run's scores, in the order of steps."""
    return sorted((run_dir / rundir.SCORES).glob(rundir.SCORE_FILES))


def read_scores(file: Path, schema: "pyarrow.Schema | None" = None) -> "pyarrow.Table":
    """The rows of one file; with a schema, as that says."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(file).read(columns=_NAMES).select(_NAMES)
        return table if schema is None else table.cast(schema)
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise RunError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error


def all_scores(run_dir: Path) -> "tuple[pyarrow.Table, list[str]]":
    """All scores of a run, and what to say of files that cannot be read. Of a step that two files
    hold, the later one counts: a resumed run writes steps anew.
    """
    import pyarrow

    schema = _schema(pyarrow)
    parts, unreadable = [schema.empty_table()], []
    for file in score_files(run_dir):
        try:
            parts.append(read_scores(file, schema))
        except RunError as error:
            unreadable.append(str(error))
    return _each_step_once(parts), unreadable


def _each_step_once(parts: "list[pyarrow.Table]") -> "pyarrow.Table":
    import numpy as np
    import pyarrow

    table = pyarrow.concat_tables(parts)
    part = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
    steps, place = np.unique(table["step"].to_numpy(), return_inverse=True)
    latest = np.zeros(len(steps), dtype=np.int64)
    np.maximum.at(latest, place, part)
    kept = part == latest[place]
    return table if kept.all() else table.filter(pyarrow.array(kept))


def _schema(pyarrow: Any) -> "pyarrow.Schema":
    """One for all files: sample ids are text, whatever they were, so that files agree."""
    kinds = [
        pyarrow.int64(),
        pyarrow.string(),
        pyarrow.string(),
        pyarrow.string(),
        *[pyarrow.float64()] * 3,
    ]
    return pyarrow.schema(list(zip(_NAMES, kinds, strict=True)))
