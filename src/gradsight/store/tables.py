"""A run's records as Arrow tables with the same columns. No torch."""

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gradsight.store import tail_format as frames
from gradsight.values.plain import plain

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow

PackedStats = tuple[int, list[str], bytes]
"""Step, the names of the layout's parameters, and the packed statistics of the step."""


def records_table(kind: type, records: Iterable[Any]) -> "pyarrow.Table":
    """Frozen records of one kind."""
    import pyarrow

    records = list(records)
    columns = {}
    for field in dataclasses.fields(kind):
        values = [getattr(record, field.name) for record in records]
        if field.name == "scalars":
            pairs = [list(value.items()) for value in values]
            arrow = pyarrow.map_(pyarrow.string(), pyarrow.float64())
            columns[field.name] = pyarrow.array(pairs, arrow)
        elif field.name == "diagnosis":
            texts = [None if value is None else json.dumps(plain(value)) for value in values]
            columns[field.name] = pyarrow.array(texts, pyarrow.string())
        else:
            columns[field.name] = pyarrow.array(values, _arrow_type(str(field.type)))
    return pyarrow.table(columns)


def stats_table(packed_steps: Iterable[PackedStats]) -> "pyarrow.Table":
    """Statistics of parameters.

    Fifteen million rows are nothing unusual here, so columns are built from the packed arrays.
    """
    import numpy as np
    import pyarrow

    codes: dict[str, int] = {}
    parts: dict[str, list[Any]] = {name: [] for name in ("step", "parameter", *frames.COLUMNS)}
    for step, names, packed in packed_steps:
        rows, columns = frames.unpack_statistics(packed, len(names))
        code_of = np.array([codes.setdefault(name, len(codes)) for name in names], dtype=np.int32)
        parts["step"].append(np.full(len(rows), step, dtype=np.int64))
        parts["parameter"].append(code_of[rows])
        for name in frames.COLUMNS:
            parts[name].append(frames.column(columns, name, len(rows)))
    arrays = {name: np.concatenate([np.zeros(0), *part]) for name, part in parts.items()}
    parameters = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(arrays["parameter"].astype(np.int32)),
        pyarrow.array(list(codes), pyarrow.string()),
    )
    table = {"step": pyarrow.array(arrays["step"].astype(np.int64)), "parameter": parameters}
    for name in frames.COLUMNS:
        table[name] = _stats_column(name, arrays[name])
    return pyarrow.table(table)


def _stats_column(name: str, values: "npt.NDArray[Any]") -> "pyarrow.Array":
    """One column of statistics, null where it was not measured."""
    import numpy as np
    import pyarrow

    if name in frames.COUNTS:
        return pyarrow.array(np.maximum(values, 0).astype(np.int64), mask=values < 0)
    if name in frames.OPTIONAL:
        return pyarrow.array(values, mask=np.isnan(values))
    return pyarrow.array(values)


def _arrow_type(annotation: str) -> Any:
    """The Arrow type for a field's annotation; None leaves it to Arrow."""
    import pyarrow

    types = {
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "str": pyarrow.string(),
        "bool": pyarrow.bool_(),
    }
    for name, arrow in types.items():
        if f"tuple[{name}, ...]" in annotation:
            return pyarrow.list_(arrow)
    for name, arrow in types.items():
        if f"'{name}'" in annotation or annotation.startswith(name):
            return arrow
    return None
