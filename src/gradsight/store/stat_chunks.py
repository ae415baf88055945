"""Statistics of many steps at once, as arrays: what long runs are shown from. No torch.

Records, one per parameter and step, are fifteen million for an ordinary run, and take minutes.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.store import tail_format as frames
from gradsight.store.tables import PackedStats

NO_GRADIENT = -1.0
"""Stands for the norm of a parameter that has no gradient at a step."""
CHUNK = 2048
"""Steps that are read at once: a chunk of 1,500 parameters takes 12 MB per column."""
_CELLS = 1 << 22
"""Numbers of a column that are read at once, however many parameters there are."""
_HEAD = 6
"""Bytes of a packed row before the rows and columns: mask, flags, count."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class StatChunk:
    """The statistics of consecutive steps that have the same list of parameters."""

    names: tuple[str, ...]
    steps: npt.NDArray[np.int64]
    columns: Mapping[str, Array]
    """By name, [steps, parameters]: always "l2" and "max_abs", others where they were measured.

    `NO_GRADIENT` in "l2" where a parameter has none at a step; NaN in any other column, 0 in
    counts, -1 in them for a count that is not known.
    """

    @property
    def l2(self) -> Array:
        """The norms."""
        return self.columns["l2"]

    def at(self, places: npt.NDArray[np.intp]) -> "StatChunk":
        """Only the steps at these positions."""
        columns = {name: values[places] for name, values in self.columns.items()}
        return StatChunk(self.names, self.steps[places], columns)

    def broken(self) -> npt.NDArray[np.bool_]:
        """Where a gradient holds a NaN or an infinity, [steps, parameters]."""
        result = np.zeros(self.l2.shape, dtype=bool)
        for name in ("nan", "inf"):
            if name in self.columns:
                result |= self.columns[name] != 0
        return result


def stat_chunks(packed: Iterable[PackedStats], size: int = CHUNK) -> Iterator[StatChunk]:
    """Packed statistics as arrays of at most so many steps; another layout begins a new one."""
    for _, of_layout in itertools.groupby(packed, key=lambda each: id(each[1])):
        rest = iter(of_layout)
        while first := next(rest, None):
            most = max(1, min(size, _CELLS // max(1, len(first[1]))))
            yield _chunk([first, *itertools.islice(rest, most - 1)])


def _chunk(batch: list[PackedStats]) -> StatChunk:
    names = tuple(batch[0][1])
    steps = np.array([step for step, _, _ in batch], dtype=np.int64)
    for _, _, blob in batch:
        frames.check_statistics(blob, len(names))
    columns = _empty_columns([blob for _, _, blob in batch], len(names))
    # Most steps are packed alike, and what is packed alike is unpacked in one go.
    alike: dict[bytes, list[int]] = {}
    for place, (_, _, blob) in enumerate(batch):
        alike.setdefault(_layout_of(blob), []).append(place)
    for head, places in alike.items():
        blobs = [batch[place][2] for place in places]
        rows, values = _unpack_alike(head, blobs, len(names))
        where = np.ix_(np.array(places), rows)
        for name, column in values.items():
            columns[name][where] = column
    return StatChunk(names, steps, columns)


def _empty_columns(blobs: list[bytes], size: int) -> dict[str, Array]:
    """Columns for whatever any of these steps has, with nothing measured yet."""
    mask = 0
    wide = 0
    for blob in blobs:
        mask |= blob[0]
        wide |= blob[1] & 1
    kind = np.float64 if wide else np.float32
    columns: dict[str, Array] = {}
    for position, name in enumerate(frames.COLUMNS):
        if mask >> position & 1 or name in ("l2", "max_abs"):
            missing = 0.0 if name in frames.COUNTS else np.nan
            columns[name] = np.full((len(blobs), size), missing, dtype=kind)
    columns["l2"].fill(NO_GRADIENT)
    return columns


def _layout_of(blob: bytes) -> bytes:
    """The part of a packed row that says what the rest is: its head, and the rows if it has any."""
    end = _HEAD
    if blob[1] & 2:
        end += 4 * int.from_bytes(blob[2:_HEAD], "little")
    return blob[:end]


def _unpack_alike(head: bytes, blobs: list[bytes], size: int) -> tuple[Array, dict[str, Array]]:
    """Rows and columns of packed rows with the same head."""
    names, kind, count = frames.check_statistics(blobs[0], size)
    rows: Array = np.arange(count)
    if len(head) > _HEAD:
        rows = np.frombuffer(head, "<u4", offset=_HEAD).astype(np.intp)
    body = b"".join(blob[len(head) :] for blob in blobs)
    values = np.frombuffer(body, kind).reshape(len(blobs), len(names), count)
    return rows, {name: values[:, place] for place, name in enumerate(names)}
