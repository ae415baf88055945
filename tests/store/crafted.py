"""Runs as a stranger could send them: made whole, changed by hand, and given checksums that fit."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from gradsight import GradsightError, open_run
from gradsight.core import rundir
from gradsight.store import tail_format as frames
from gradsight.store.record_file import seal
from gradsight.store.store import open_store
from gradsight.values.findings import Finding
from gradsight.values.histograms import Histogram
from gradsight.values.steps import Step

NAMES = ["a.weight", "a.bias"]
METHODS = (
    *("steps", "parameter_stats", "histograms", "scalars", "findings"),
    *("problems", "abstentions", "memory", "scores", "incidents", "expert_stats"),
)


def small_run(folder: Path, steps: int = 5) -> Path:
    """A run with something of every kind in its record."""
    store = open_store(folder)
    fill(store, range(steps))
    counted = Histogram(1, None, -3, (1.0,), (2.0,), 4.0, 0.0, 0.0, 0.0, 7, 7)
    store.add_histograms(1, [counted])
    store.add_tracked(2, {"epoch/accuracy": 0.5})
    store.add_experts(1, {"a.weight": np.array([1.0, 0.0])})
    store.add_record("abstention", "GS501", 0, {"code": "GS501", "name": "x", "reason": "y"})
    store.add_finding(
        Finding("GS103", "nonfinite", "critical", ("a.bias",), 1, "seen", "said", "do", "code")
    )
    store.problems.count("mine", "a fault", 2)
    store.write_config({"settings": {}, "parameters": [{"name": name} for name in NAMES]})
    store.close()
    return folder


def fill(store: Any, numbers: Any) -> None:
    for number in numbers:
        values = np.array([number + 1.0, 2.0])
        packed = frames.pack_statistics(None, {"l2": values, "max_abs": values / 2})
        step = Step(number, 1.0, loss=float(number), scalars={"accuracy": 0.5})
        store.add_step(step, NAMES, packed)


def change(folder: Path, script: str, values: Any = ()) -> None:
    """Change a record with SQL, as if it had been written so."""
    file = folder / rundir.RECORD
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("PRAGMA user_version = 0")
        if values:
            connection.execute(script, values)
        else:
            connection.executescript(script)
        connection.commit()
    with file.open("r+b") as opened:
        seal(opened.fileno())


def everything(folder: Path) -> dict[str, list[Any]]:
    """All that a run gives."""
    run = open_run(folder)
    found: dict[str, list[Any]] = {name: list(getattr(run, name)()) for name in METHODS}
    found["config"] = [run.config]
    found["next_step"] = [run.next_step()]
    run.close()
    return found


def refusals(folder: Path) -> Iterator[str]:
    """What is said of a run, method by method; anything but an error of ours passes through."""
    try:
        run = open_run(folder)
    except GradsightError as error:
        yield str(error)
        return
    for name in (*METHODS, "next_step"):
        try:
            found = getattr(run, name)()
            if name != "next_step":
                for _ in found:
                    pass
        except GradsightError as error:
            yield str(error)
    run.close()
