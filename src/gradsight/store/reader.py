"""Reads a run, also while it is being written. No torch."""

import dataclasses
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsight.core import rundir
from gradsight.errors import RunError, UsageError
from gradsight.store import schema
from gradsight.store import tail_format as frames
from gradsight.store.diagnoses import unpack_diagnosis
from gradsight.store.incidents import read_incidents, with_ranks
from gradsight.store.scores import all_scores, read_scores, score_files
from gradsight.store.store import recover
from gradsight.values.diagnoses import Incident
from gradsight.values.findings import Finding
from gradsight.values.health_report import Abstention
from gradsight.values.histograms import Histogram
from gradsight.values.plain import plain
from gradsight.values.problems import Problem
from gradsight.values.scores import SampleScore
from gradsight.values.steps import ParameterStat, Scalar, Step

if TYPE_CHECKING:
    import pyarrow


def open_run(run_dir: str | os.PathLike[str]) -> "Run":
    """A run directory for reading. A run that was killed is put in order first: what it had handed
    over is in it.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise RunError(f"there is no run directory at {path}")
    file = path / rundir.RECORD
    if not file.is_file():
        raise RunError(f"{path} is not a run directory: it has no {rundir.RECORD}")
    return Run(path)


class Run:
    """A recorded run. Every method gives an iterator of frozen records, in the order of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _finish_killed_run(path)
            self._connection = _connect(path)
            schema.check_version(self._connection, path / rundir.RECORD)
        except sqlite3.Error as error:
            raise _damaged(path, error) from error

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says; empty where there is none."""
        file = self.path / rundir.CONFIG
        if not file.exists():
            return {}
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"{file} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise RunError(f"{file} should hold a JSON object, but holds a {type(config).__name__}")
        return config

    def steps(self) -> Iterator[Step]:
        """Every optimizer step."""
        scalars = self._scalars_by_step()
        upcoming = next(scalars, None)
        for row in self._rows(
            "SELECT step, time, loss, lr, total_norm, clip_coef, scale, skipped, gradient FROM steps "
            "WHERE time IS NOT NULL ORDER BY step"
        ):
            step, time, loss, lr, total_norm, clip_coef, scale, skipped, gradient = row
            while upcoming is not None and upcoming[0] < step:
                upcoming = next(scalars, None)
            extra = upcoming[1] if upcoming is not None and upcoming[0] == step else {}
            yield Step(
                step=step,
                time=time,
                loss=_number(loss),
                lr=_number(lr),
                total_norm=_number(total_norm),
                clip_coef=_number(clip_coef),
                scale=_number(scale),
                skipped=bool(skipped),
                gradient=gradient,
                scalars=extra,
            )

    def parameter_stats(self, parameter: str | None = None) -> Iterator[ParameterStat]:
        """The gradient of every parameter (or of one) at every step."""
        for step, names, packed in self._packed_stats():
            for stat in frames.statistics(step, names, packed):
                if parameter is None or stat.parameter == parameter:
                    yield stat

    def histograms(self, parameter: str | None = "*") -> Iterator[Histogram]:
        """All histograms; those of one parameter; or, with None, those over all parameters
        together.
        """
        for step, packed in self._rows("SELECT step, packed FROM histograms ORDER BY step, source"):
            for histogram in frames.unpack_histograms(step, packed):
                if parameter in ("*", histogram.parameter):
                    yield histogram

    def scalars(self, name: str | None = None) -> Iterator[Scalar]:
        """Whatever was logged by name, apart from loss and lr, which are in the steps."""
        where, values = ("WHERE name = ?", (name,)) if name is not None else ("", ())
        for step, found, value in self._rows(
            f"SELECT step, name, value FROM scalars {where} ORDER BY step, name", values
        ):
            yield Scalar(step, found, float(value))

    def findings(self) -> Iterator[Finding]:
        """What the health instrument judged."""
        found = []
        for value in self._records("finding"):
            diagnosis = unpack_diagnosis(value.get("diagnosis"))
            found.append(
                Finding(
                    **{**value, "parameters": tuple(value["parameters"]), "diagnosis": diagnosis}
                )
            )
        yield from with_ranks(self.path, found)

    def problems(self) -> Iterator[Problem]:
        """Faults of Gradsight's own that training survived."""
        for value in self._records("problem"):
            yield Problem(**value)

    def abstentions(self) -> Iterator[Abstention]:
        """The checks that could not judge this run, and why."""
        for value in self._records("abstention"):
            yield Abstention(**value)

    def memory(self) -> Iterator[Scalar]:
        """What the memory monitor saw, and what the verification of activation checkpointing
        measured.
        """
        return (
            scalar
            for scalar in self.scalars()
            if scalar.name.startswith(("memory/", "checkpointing/"))
        )

    def scores(self) -> Iterator[SampleScore]:
        """Every training sample's score, as the ghost engine saved them."""
        for file in score_files(self.path):
            for row in read_scores(file).to_pylist():
                yield SampleScore(**row)

    def score_table(self) -> "tuple[pyarrow.Table, list[str]] | None":
        """All scores as a table, and what to say of files that cannot be read; None where there are
        no scores at all.
        """
        return all_scores(self.path) if score_files(self.path) else None

    def incidents(self) -> Iterator[Incident]:
        """The flight recorder's bundles."""
        return iter(read_incidents(self.path))

    def to_arrow(self, name: str) -> "pyarrow.Table":
        """The records of one kind as a table with the same columns."""
        if name == "parameter_stats":
            return self._stats_table()
        if name == "scores":
            return self._scores_table()
        kinds: dict[str, tuple[type, Callable[[], Iterator[Any]]]] = {
            "steps": (Step, self.steps),
            "histograms": (Histogram, self.histograms),
            "scalars": (Scalar, self.scalars),
            "findings": (Finding, self.findings),
            "memory": (Scalar, self.memory),
            "incidents": (Incident, self.incidents),
            "problems": (Problem, self.problems),
        }
        if name not in kinds:
            raise UsageError(
                f"a run has no table {name!r}; it has {', '.join(sorted([*kinds, 'parameter_stats', 'scores']))}"
            )
        return _table(*kinds[name])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._connection.execute(query, values)
        except sqlite3.Error as error:
            raise _damaged(self.path, error) from error

    def _records(self, kind: str) -> Iterator[dict[str, Any]]:
        for (value,) in self._rows(
            "SELECT value FROM records WHERE kind = ? ORDER BY step, key", (kind,)
        ):
            yield json.loads(value)

    def _scalars_by_step(self) -> Iterator[tuple[int, dict[str, float]]]:
        step, found = -1, dict[str, float]()
        for scalar in self.scalars():
            if scalar.step != step:
                if found:
                    yield step, found
                step, found = scalar.step, {}
            found[scalar.name] = scalar.value
        if found:
            yield step, found

    def _packed_stats(self) -> Iterator[tuple[int, list[str], bytes]]:
        layouts: dict[int, list[str]] = {}
        for step, layout, packed in self._rows(
            "SELECT step, layout, packed FROM stats ORDER BY step"
        ):
            if layout not in layouts:
                layouts = {
                    number: json.loads(names)
                    for number, names in self._rows("SELECT layout, names FROM layouts")
                }
            if layout not in layouts:
                raise RunError(
                    f"{self.path / rundir.RECORD} is damaged: step {step} has an unknown layout {layout}"
                )
            yield step, layouts[layout], packed

    def _scores_table(self) -> "pyarrow.Table":
        table, unreadable = all_scores(self.path)
        if unreadable:
            raise RunError(unreadable[0])
        return table

    def _stats_table(self) -> "pyarrow.Table":
        """Fifteen million rows are nothing unusual here, so columns are built from the packed
        arrays.
        """
        import numpy as np
        import pyarrow

        numbers: dict[str, int] = {}
        parts: dict[str, list[Any]] = {name: [] for name in ("step", "parameter", *frames.COLUMNS)}
        for step, names, packed in self._packed_stats():
            rows, columns = frames.unpack_statistics(packed, len(names))
            known = np.array(
                [numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int32
            )
            parts["step"].append(np.full(len(rows), step, dtype=np.int64))
            parts["parameter"].append(known[rows])
            for name in frames.COLUMNS:
                empty = np.full(len(rows), np.nan if name.startswith("update") else 0.0)
                parts[name].append(columns.get(name, empty))
        arrays = {
            name: np.concatenate(part) if part else np.zeros(0) for name, part in parts.items()
        }
        table = {"step": pyarrow.array(arrays["step"].astype(np.int64))}
        codes = pyarrow.array(arrays["parameter"].astype(np.int32))
        table["parameter"] = pyarrow.DictionaryArray.from_arrays(
            codes, pyarrow.array(list(numbers), pyarrow.string())
        )
        for name in frames.COLUMNS:
            values = arrays[name]
            if name in ("nan", "inf"):
                table[name] = pyarrow.array(np.maximum(values, 0).astype(np.int64), mask=values < 0)
            elif name.startswith("update"):
                table[name] = pyarrow.array(values, mask=np.isnan(values))
            else:
                table[name] = pyarrow.array(values)
        return pyarrow.table(table)


def _table(kind: type, rows: Callable[[], Iterator[Any]]) -> "pyarrow.Table":
    import pyarrow

    records = list(rows())
    columns = {}
    for field in dataclasses.fields(kind):
        values = [getattr(record, field.name) for record in records]
        if field.name == "scalars":
            values = [list(value.items()) for value in values]
            columns[field.name] = pyarrow.array(
                values, pyarrow.map_(pyarrow.string(), pyarrow.float64())
            )
        elif field.name == "diagnosis":
            texts = [None if value is None else json.dumps(plain(value)) for value in values]
            columns[field.name] = pyarrow.array(texts, pyarrow.string())
        else:
            columns[field.name] = pyarrow.array(values, _arrow_type(str(field.type)))
    return pyarrow.table(columns)


def _arrow_type(annotation: str) -> Any:
    import pyarrow

    plain = {
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "str": pyarrow.string(),
        "bool": pyarrow.bool_(),
    }
    for name, arrow in plain.items():
        if f"tuple[{name}, ...]" in annotation:
            return pyarrow.list_(arrow)
    return next(
        (
            arrow
            for name, arrow in plain.items()
            if f"'{name}'" in annotation or annotation.startswith(name)
        ),
        None,
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _damaged(path: Path, error: sqlite3.Error) -> RunError:
    return RunError(f"{path / rundir.RECORD} is damaged or is not a run: {error}")


def _finish_killed_run(path: Path) -> None:
    """Bring in the tail of a run that nobody is writing any more."""
    tail = path / rundir.TAIL
    if (
        not tail.exists()
        or tail.stat().st_size == 0
        or not os.access(tail, os.W_OK)
        or not os.access(path, os.W_OK)
    ):
        return
    descriptor = os.open(tail, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        connection = sqlite3.connect(path / rundir.RECORD, timeout=10)
        try:
            schema.check_version(connection, path / rundir.RECORD)
            recover(connection, descriptor)
        finally:
            connection.close()
    except BlockingIOError:
        pass  # it is being written: its own thread brings the tail in
    finally:
        os.close(descriptor)


def _connect(path: Path) -> sqlite3.Connection:
    """Read only. Where nothing may be written at all, the file is read as it is, and a left tail
    from memory.
    """
    file = path / rundir.RECORD
    if os.access(path, os.W_OK):
        return sqlite3.connect(
            f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=10, check_same_thread=False
        )
    unchanging = sqlite3.connect(
        f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
    )
    tail = path / rundir.TAIL
    if not tail.exists() or tail.stat().st_size == 0:
        return unchanging
    copy = sqlite3.connect(":memory:", check_same_thread=False)
    unchanging.backup(copy)
    last = schema.last_frame(copy)
    schema.apply(copy, [frame for frame in frames.unpack(tail.read_bytes()) if frame[0] > last])
    return copy
