"""Reads a run, also while it is being written. No torch."""

import fcntl
import itertools
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsight.core import rundir
from gradsight.errors import RunError, UsageError, WrongPlace
from gradsight.store import schema
from gradsight.store import tail_format as frames
from gradsight.store.diagnoses import unpack_diagnosis
from gradsight.store.incidents import read_incidents, with_ranks
from gradsight.store.run_files import read_run_config
from gradsight.store.scores import each_step_once, readable_scores, score_files, step_after
from gradsight.store.store import recover
from gradsight.store.tables import PackedStats, records_table, stats_table
from gradsight.values.diagnoses import Incident
from gradsight.values.findings import Finding, Problem
from gradsight.values.health_report import Abstention
from gradsight.values.histograms import Histogram
from gradsight.values.scores import SampleScore
from gradsight.values.steps import ParameterStat, Scalar, Step

if TYPE_CHECKING:
    import pyarrow


_KINDS: dict[str, type] = {
    "steps": Step,
    "histograms": Histogram,
    "scalars": Scalar,
    "findings": Finding,
    "memory": Scalar,
    "incidents": Incident,
    "problems": Problem,
}
"""The records that a table is made of, by the method that gives them."""


def open_run(run_dir: str | os.PathLike[str]) -> "Run":
    """A run directory for reading.

    A run that was killed is put in order first, so that all it had handed over is in it.

    run_dir: the directory that `watch` was given.
    """
    path = rundir.directory_path(run_dir, "run_dir")
    if not path.is_dir():
        raise WrongPlace(f"there is no run directory at {path}")
    file = path / rundir.RECORD
    if not file.is_file():
        raise WrongPlace(f"{path} is not a run directory: it has no {rundir.RECORD}")
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
        return read_run_config(self.path)

    def next_step(self) -> int:
        """The step after the last one that was recorded or scored."""
        try:
            return step_after(schema.last_step(self._connection), self.path)
        except sqlite3.Error as error:
            raise _damaged(self.path, error) from error

    def steps(self) -> Iterator[Step]:
        """Every optimizer step."""
        scalars = self._scalars_by_step()
        upcoming = next(scalars, None)
        columns = "step, time, loss, lr, total_norm, clip_coef, scale, skipped, gradient"
        # A step that was only logged to has no time yet: it has not been made.
        query = f"SELECT {columns} FROM steps WHERE time IS NOT NULL ORDER BY step"
        for row in self._rows(query):
            step, time, loss, lr, total_norm, clip_coef, scale, skipped, gradient = row
            # Both come in the order of steps, so that neither has to be held in memory as a whole.
            while upcoming is not None and upcoming[0] < step:
                upcoming = next(scalars, None)
            extra = {}
            if upcoming is not None and upcoming[0] == step:
                extra = upcoming[1]
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
        """All histograms, those of one parameter, or (None) those over all parameters together."""
        query = "SELECT step, source, packed FROM histograms ORDER BY step, source"
        for step, name, packed in self._rows(query):
            source = "tracker" if name else "watch"
            for histogram in frames.unpack_histograms(step, packed, source):
                if parameter in ("*", histogram.parameter):
                    yield histogram

    def scalars(self, name: str | None = None) -> Iterator[Scalar]:
        """Whatever was logged by name, apart from loss and lr, which are in the steps.

        Also what trackers were given: their steps are their own, and their source says so.
        """
        tables = {"watch": "scalars"}
        if schema.has_tracked(self._connection):
            tables["tracker"] = "tracked"
        yield from self._scalars(tables, name)

    def findings(self) -> Iterator[Finding]:
        """What the health instrument judged."""
        findings = []
        for value in self._records("finding"):
            value["parameters"] = tuple(value["parameters"])
            value["diagnosis"] = unpack_diagnosis(value.get("diagnosis"))
            findings.append(Finding(**value))
        yield from with_ranks(self.path, findings)

    def problems(self) -> Iterator[Problem]:
        """Faults of Gradsight's own that training survived."""
        for value in self._records("problem"):
            yield Problem(**value)

    def abstentions(self) -> Iterator[Abstention]:
        """The checks that could not judge this run, and why."""
        for value in self._records("abstention"):
            yield Abstention(**value)

    def memory(self) -> Iterator[Scalar]:
        """The memory monitor's numbers, and those of verifying activation checkpointing."""
        for scalar in self.scalars():
            if scalar.name.startswith(("memory/", "checkpointing/")):
                yield scalar

    def scores(self) -> Iterator[SampleScore]:
        """Every training sample's score, as the ghost engine saved them."""
        # File by file: all scores of a long run would not fit into memory as records.
        for table in each_step_once(self.path):
            for row in table.to_pylist():
                yield SampleScore(**row)

    def score_table(self) -> "tuple[pyarrow.Table, list[str]] | None":
        """All scores as a table, and what to say of unreadable files; None without any scores."""
        if not score_files(self.path):
            return None
        return readable_scores(self.path)

    def incidents(self) -> Iterator[Incident]:
        """The flight recorder's bundles."""
        return iter(read_incidents(self.path))

    def to_arrow(self, name: str) -> "pyarrow.Table":
        """The records of one kind as a table with the same columns."""
        if name == "parameter_stats":
            return stats_table(self._packed_stats())
        if name == "scores":
            table, unreadable = readable_scores(self.path)
            if unreadable:
                raise RunError(unreadable[0])
            return table
        if name not in _KINDS:
            known = ", ".join(sorted([*_KINDS, "parameter_stats", "scores"]))
            raise UsageError(f"a run has no table {name!r}; it has {known}")
        return records_table(_KINDS[name], getattr(self, name)())

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _rows(self, query: str, values: Any = ()) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._connection.execute(query, values)
        except sqlite3.Error as error:
            raise _damaged(self.path, error) from error

    def _records(self, kind: str) -> Iterator[dict[str, Any]]:
        for (value,) in self._rows(
            "SELECT value FROM records WHERE kind = ? ORDER BY step, key", (kind,)
        ):
            yield json.loads(value)

    def _scalars(self, tables: dict[str, str], name: str | None = None) -> Iterator[Scalar]:
        """The scalars of these tables, by source."""
        parts = []
        for source, table in tables.items():
            where = "" if name is None else "WHERE name = :name"
            parts.append(f"SELECT step, name, value, '{source}' FROM {table} {where}")
        query = f"{' UNION ALL '.join(parts)} ORDER BY step, name"
        for step, logged, value, source in self._rows(query, {"name": name}):
            yield Scalar(step, logged, float(value), source)

    def _scalars_by_step(self) -> Iterator[tuple[int, dict[str, float]]]:
        # Trackers count epochs, or what they like: none of it is of an optimizer step.
        logged = self._scalars({"watch": "scalars"})
        for step, scalars in itertools.groupby(logged, key=lambda scalar: scalar.step):
            yield step, {scalar.name: scalar.value for scalar in scalars}

    def _packed_stats(self) -> Iterator[PackedStats]:
        layouts: dict[int, list[str]] = {}
        for step, layout, packed in self._rows(
            "SELECT step, layout, packed FROM stats ORDER BY step"
        ):
            if layout not in layouts:
                # A run that is being written can get another layout while it is read.
                layouts = self._layouts()
            if layout not in layouts:
                what = f"step {step} has an unknown layout {layout}"
                raise RunError(f"{self.path / rundir.RECORD} is damaged: {what}")
            yield step, layouts[layout], packed

    def _layouts(self) -> dict[int, list[str]]:
        """The lists of parameter names by number."""
        rows = self._rows("SELECT layout, names FROM layouts")
        return {number: json.loads(names) for number, names in rows}


def _number(value: Any) -> float | None:
    """A number of the record; NaN is kept as text there."""
    return None if value is None else float(value)


def _damaged(path: Path, error: sqlite3.Error) -> RunError:
    return RunError(f"{path / rundir.RECORD} is damaged or is not a run: {error}")


def _finish_killed_run(path: Path) -> None:
    """Bring in the tail of a run that nobody is writing any more."""
    tail = path / rundir.TAIL
    if not _has_bytes(tail) or not os.access(tail, os.W_OK) or not os.access(path, os.W_OK):
        return
    descriptor = os.open(tail, os.O_RDWR)
    # Whoever writes the run holds this lock, so that getting it proves that nobody does.
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


def _has_bytes(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _connect(path: Path) -> sqlite3.Connection:
    """Open the record for reading; in a folder that cannot be written, together with its tail."""
    address = f"{(path / rundir.RECORD).resolve().as_uri()}?mode=ro"
    if os.access(path, os.W_OK):
        return sqlite3.connect(address, uri=True, timeout=10, check_same_thread=False)
    # With a write-ahead log SQLite makes files beside the record even to read it, unless it is told
    # that nothing changes.
    unchanging = sqlite3.connect(f"{address}&immutable=1", uri=True, check_same_thread=False)
    tail = path / rundir.TAIL
    if not _has_bytes(tail):
        return unchanging
    # The tail cannot be brought into a record that cannot be written, but into a copy of it.
    copy = sqlite3.connect(":memory:", check_same_thread=False)
    unchanging.backup(copy)
    last = schema.last_frame(copy)
    schema.apply(copy, [frame for frame in frames.unpack(tail.read_bytes()) if frame[0] > last])
    return copy
