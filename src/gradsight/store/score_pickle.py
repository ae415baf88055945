"""Score files as pickles, for tools that expect them: written where asked for, never opened.

Beside iter_000010.parquet stands iter_000010.pkl: a dict of numpy arrays, one for each column, all
with one entry per row. Missing numbers are NaN, missing text is None, and `by_parameter` is a table
[rows, parameters]. No torch.
"""

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gradsight.core.files import whole_file
from gradsight.errors import RunError
from gradsight.store.scores import read_score_file

if TYPE_CHECKING:
    import pyarrow


def pickle_beside(score_file: Path) -> Path:
    """Where the pickle of a score file stands."""
    return score_file.with_suffix(".pkl")


def write_pickle(score_file: Path) -> str | None:
    """Write a score file's pickle, unless it is there; returns what to say if it cannot be."""
    path = pickle_beside(score_file)
    if path.exists():
        return None
    try:
        columns = as_arrays(read_score_file(score_file))
        with whole_file(path, below=path.parents[1]) as partial:
            partial.write_bytes(pickle.dumps(columns))
    except (OSError, RunError) as error:
        return f"{path} could not be written: {error}; {score_file.name} has the scores"
    return None


def remove_pickle(score_file: Path) -> None:
    """Remove a score file's pickle, if it has one: the file is about to change or to go."""
    path = pickle_beside(score_file)
    if path.exists():
        path.unlink()


def as_arrays(table: "pyarrow.Table") -> dict[str, npt.NDArray[Any]]:
    """The columns of a table of scores, by name."""
    arrays = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    if "by_parameter" in arrays:
        arrays["by_parameter"] = _as_matrix(table["by_parameter"].to_pylist())
    return arrays


def _as_matrix(rows: list[list[float | None] | None]) -> npt.NDArray[np.float64]:
    """Lists of one length as a table, NaN for a missing number and for each of a missing list."""
    width = max((len(row) for row in rows if row is not None), default=0)
    missing: list[float | None] = [None] * width
    matrix = np.array([row or missing for row in rows], dtype=np.float64)
    return matrix.reshape(len(rows), width)
