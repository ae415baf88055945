"""Reads an offline W&B run from its file: a LevelDB log of protobuf records behind a header of seven bytes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32768


def history(folder: Path) -> dict[int, dict[str, Any]]:
    """What was logged, by W&B step, of the only run below a folder."""
    (file,) = folder.rglob("*.wandb")
    rows: dict[int, dict[str, Any]] = {}
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
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
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last
            yield parts
            parts = b""
