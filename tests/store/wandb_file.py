"""Reads an offline W&B run from its file: a LevelDB log of protobuf records behind a header of
seven bytes.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32768


def history(folder: Path) -> dict[int, dict[str, Any]]:
    """What was logged, by W&B step, of the only run below a folder; W&B may still be writing when
    `finish` returns.
    """
    (file,) = folder.rglob("*.wandb")
    deadline = time.monotonic() + 50
    while True:
        records = [Record.FromString(data) for data in _records(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return _rows(records)
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.1)


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
