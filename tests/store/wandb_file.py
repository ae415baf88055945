"""Reads an offline W&B run from its file: a LevelDB log of protobuf records behind a header of
seven bytes.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32768


@dataclass(frozen=True)
class WandbRun:
    """A run as W&B has it."""

    id: str
    project: str
    group: str
    name: str
    sweep: str
    rows: dict[int, dict[str, Any]]
    """By W&B's own step."""
    over: dict[str, str]
    """The metric that each pattern of names is drawn over."""

    def logged(self) -> dict[int, dict[str, Any]]:
        """The rows without what W&B adds: the time, and the step once more."""
        return {
            step: {name: value for name, value in row.items() if not name.startswith("_")}
            for step, row in self.rows.items()
        }

    def by_step(self) -> dict[int, dict[str, Any]]:
        """The rows by our step; each of them is there once."""
        steps = [row["gradsight/step"] for row in self.rows.values()]
        assert len(set(steps)) == len(steps), f"a step is there twice: {steps}"
        return {row["gradsight/step"]: row for row in self.logged().values()}


def history(folder: Path) -> dict[int, dict[str, Any]]:
    """What was logged, by W&B step, of the only run below a folder."""
    (run,) = runs(folder)
    return run.rows


def runs(folder: Path) -> list[WandbRun]:
    """The runs below a folder; W&B may still be writing when `finish` returns."""
    return [_read(file) for file in sorted(folder.rglob("*.wandb"))]


def _read(file: Path) -> WandbRun:
    deadline = time.monotonic() + 150
    while True:
        records = [Record.FromString(data) for data in _records(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            break
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.1)
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    defined = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    over = {metric.glob_name: metric.step_metric for metric in defined if metric.glob_name}
    return WandbRun(
        id=run.run_id,
        project=run.project,
        group=run.run_group,
        name=run.display_name,
        sweep=run.sweep_id,
        rows=_rows(records),
        over=over,
    )


def _rows(records: list[Record]) -> dict[int, dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = rows.setdefault(record.history.step.num, {})
            for item in record.history.item:
                *path, last = item.nested_key or [item.key]
                target = row
                for key in path:
                    target = target.setdefault(key, {})
                target[last] = json.loads(item.value_json)
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        if position + 7 + length > len(data):  # being written
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last
            yield parts
            parts = b""
