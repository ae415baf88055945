"""Statistics as arrays are those of the records, one by one."""

import math
from pathlib import Path

import numpy as np

from gradsight import open_run
from gradsight.store import tail_format as frames
from gradsight.store.stat_chunks import NO_GRADIENT
from gradsight.store.store import open_store
from gradsight.values.steps import Step

NAMES = ["a.weight", "a.bias", "b"]
OTHERS = ["b", "c"]


def write(folder: Path) -> None:
    """Steps that differ in parameters, columns, rows and width of numbers."""
    store = open_store(folder)
    for number in range(12):
        norms = np.array([number + 0.5, math.nan if number == 4 else 2.0, 1e-3])
        columns = {"l2": norms, "max_abs": norms / 2}
        if number % 5 == 0:
            columns["update_ratio"] = norms / 7
        rows = None
        names = NAMES
        if number in (6, 7):
            rows = [0, 2]
            columns = {name: values[rows] for name, values in columns.items()}
        if number == 9:
            names = OTHERS
            columns = {name: values[:2] for name, values in columns.items()}
        if number == 10:
            columns["l2"] = norms * 1e200
        packed = frames.pack_statistics(rows, columns, wide=number == 10)
        store.add_step(Step(number, 1.0), names, packed)
    store.close()


def cells(folder: Path, column: str, after: int = -1) -> dict[tuple[int, str], float]:
    found = {}
    for chunk in open_run(folder).stat_chunks(after):
        empty = np.full(chunk.l2.shape, math.nan)
        for step, row in zip(chunk.steps, chunk.columns.get(column, empty), strict=True):
            for name, value in zip(chunk.names, row, strict=True):
                found[int(step), name] = float(value)
    return found


def test_arrays_and_records_agree(tmp_path: Path) -> None:
    write(tmp_path)
    norms = cells(tmp_path, "l2")
    ratios = cells(tmp_path, "update_ratio")
    seen = {}
    for stat in open_run(tmp_path).parameter_stats():
        seen[stat.step, stat.parameter] = stat.l2
        ratio = math.nan if stat.update_ratio is None else stat.update_ratio
        np.testing.assert_equal(ratios[stat.step, stat.parameter], ratio)
    present = {key: norm for key, norm in norms.items() if norm != NO_GRADIENT}
    np.testing.assert_equal(present, seen)
    assert norms.keys() - seen.keys() == {(6, "a.bias"), (7, "a.bias")}


def test_only_what_is_new(tmp_path: Path) -> None:
    write(tmp_path)
    every = cells(tmp_path, "l2")
    new = cells(tmp_path, "l2", after=8)
    assert {step for step, _ in new} == {9, 10, 11}
    np.testing.assert_equal(new, {key: every[key] for key in every if key[0] > 8})
