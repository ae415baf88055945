"""What the training thread hands over, as bytes: the frames of a run's tail. No torch.

    frame      u32 length of the payload, u32 crc32 of number, kind and payload, u64 number,
               u8 kind, payload
    number     counts up by one from frame to frame of a run
    kind       1 step with statistics, 2 scalars, 3 histograms, 4 any other record as JSON,
               5 scalars of a step (also loss, lr), 6 layout: the names of the parameters that rows
               of statistics stand for, 7 scalars under a tracker's own count

All numbers are little-endian. A frame that is cut off or damaged ends the reading: what follows it
is not trusted.
"""

import dataclasses
import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from gradsight.errors import RunError
from gradsight.values.histograms import Histogram
from gradsight.values.steps import ParameterStat, Step

STEP = 1
SCALARS = 2
HISTOGRAMS = 3
RECORD = 4
STEP_SCALARS = 5
LAYOUT = 6
TRACKED = 7
Frame = tuple[int, int, bytes]
"""Number, kind, payload."""

_HEAD = struct.Struct("<IIQB")
_STEP = struct.Struct("<qdddddd?BqHI")
_OPTIONAL = ("loss", "lr", "total_norm", "clip_coef", "scale")

_COUNTED = tuple(field.name for field in dataclasses.fields(Histogram)[1:-1])
_STATISTICS = dataclasses.fields(ParameterStat)[2:]
COLUMNS = tuple(field.name for field in _STATISTICS)
"""The numbers of a parameter. Their order is the format's: a new one goes to the end."""
COUNTS = frozenset(field.name for field in _STATISTICS if int in get_args(field.type))
"""Columns of counts, where -1 stands for a count that is not known."""
OPTIONAL = frozenset(field.name for field in _STATISTICS if field.default is None)
"""Columns that are not always measured, where NaN stands for none."""


def pack(number: int, kind: int, payload: bytes) -> bytes:
    """A frame ready to be appended to the tail."""
    return _HEAD.pack(len(payload), _checksum(number, kind, payload), number, kind) + payload


def unpack(data: bytes) -> Iterator[Frame]:
    """The whole frames at the beginning of `data`."""
    position = 0
    while position + _HEAD.size <= len(data):
        length, checksum, number, kind = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        payload = data[position : position + length]
        if len(payload) < length or _checksum(number, kind, payload) != checksum:
            # The length may be what is damaged, so that nobody knows where the next frame begins.
            return
        position += length
        yield number, kind, payload


def _checksum(number: int, kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<QB", number, kind)))


def pack_step(step: Step, layout: int, statistics: bytes) -> bytes:
    """One step; `statistics` comes from `pack_statistics`, or is empty."""
    values = [getattr(step, name) for name in _OPTIONAL]
    present = sum(1 << position for position, value in enumerate(values) if value is not None)
    gradient = step.gradient.encode()
    scalars = b""
    if step.scalars:
        scalars = json.dumps(dict(step.scalars)).encode()
    head = _STEP.pack(
        step.step,
        step.time,
        *(0.0 if value is None else value for value in values),
        step.skipped,
        present,
        layout,
        len(gradient),
        len(scalars),
    )
    return head + gradient + scalars + statistics


def unpack_step(payload: bytes) -> tuple[Step, int, bytes]:
    """Step, layout and packed statistics."""
    number, time, *values, skipped, present, layout, gradient_size, scalars_size = (
        _STEP.unpack_from(payload)
    )
    known = {}
    for position, name in enumerate(_OPTIONAL):
        if present >> position & 1:
            known[name] = values[position]
    scalars_start = _STEP.size + gradient_size
    statistics_start = scalars_start + scalars_size
    scalars = payload[scalars_start:statistics_start]
    step = Step(
        step=number,
        time=time,
        **known,
        skipped=skipped,
        gradient=payload[_STEP.size : scalars_start].decode(),
        scalars=json.loads(scalars or b"{}"),
    )
    return step, layout, payload[statistics_start:]


def pack_statistics(
    rows: Sequence[int] | None, columns: Mapping[str, npt.NDArray[np.float64]], wide: bool = False
) -> bytes:
    """Columns of statistics, each of the same length, for all parameters or for some `rows` only.

    u8 mask of columns, u8 flags (1 doubles, for norms that do not fit a float32; 2 rows), u32 how
    many, rows as u32, columns.
    """
    names = [name for name in COLUMNS if name in columns]
    mask = sum(1 << COLUMNS.index(name) for name in names)
    # Four bytes halve a long run; wide norms would become infinite in them.
    kind = np.dtype("<f8" if wide else "<f4")
    size = len(columns["l2"])
    parts = [struct.pack("<BBI", mask, wide | (rows is not None) << 1, size)]
    if rows is not None:
        parts.append(np.asarray(rows, dtype="<u4").tobytes())
    parts += [columns[name].astype(kind).tobytes() for name in names]
    return b"".join(parts)


def unpack_statistics(
    packed: bytes, size: int
) -> tuple[npt.NDArray[np.intp], dict[str, npt.NDArray[np.float64]]]:
    """Rows of the layout (which has `size` parameters) and the columns measured for them."""
    try:
        mask, flags, count = struct.unpack_from("<BBI", packed)
        offset = 6
        rows = np.arange(count)
        if flags & 2:
            rows = np.frombuffer(packed, "<u4", count, offset).astype(np.intp)
            offset += 4 * count
        kind = np.dtype("<f8" if flags & 1 else "<f4")
        columns = {}
        for position, name in enumerate(COLUMNS):
            if mask >> position & 1:
                columns[name] = np.frombuffer(packed, kind, count, offset).astype(np.float64)
                offset += count * kind.itemsize
        if offset != len(packed) or (count and rows.max() >= size):
            raise ValueError("its length does not fit")
    except (struct.error, ValueError) as error:
        raise RunError(f"a row of statistics is damaged: {error}") from error
    return rows, columns


def statistics(step: int, names: Sequence[str], packed: bytes) -> Iterator[ParameterStat]:
    """The packed statistics of one step as records."""
    rows, columns = unpack_statistics(packed, len(names))
    fields = [_field(columns, name, len(rows)) for name in COLUMNS]
    for row, values in zip(rows.tolist(), zip(*fields, strict=True), strict=True):
        yield ParameterStat(step, names[row], *values)


def column(
    columns: Mapping[str, npt.NDArray[np.float64]], name: str, size: int
) -> npt.NDArray[np.float64]:
    """A column of statistics; one that was not packed is empty, or 0 where there is always one."""
    if name in columns:
        return columns[name]
    return np.full(size, np.nan if name in OPTIONAL else 0.0)


def _field(columns: Mapping[str, npt.NDArray[np.float64]], name: str, size: int) -> list[Any]:
    """A column as the values of a record's field."""
    values: list[float] = column(columns, name, size).tolist()
    if name in COUNTS:
        return [None if value < 0 else int(value) for value in values]
    if name in OPTIONAL:
        return [None if value != value else value for value in values]
    return values


def pack_layout(names: Sequence[str]) -> tuple[int, bytes]:
    """A list of parameter names, and the number by which steps refer to it.

    The number is made of the names, so that a resumed run finds its own list again.
    """
    text = json.dumps(list(names)).encode()
    # Seven bytes, so that the number fits the signed 64 bits of an SQLite key.
    number = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
    return number, struct.pack("<q", number) + text


def unpack_layout(payload: bytes) -> tuple[int, str]:
    """Number and names, these still as JSON."""
    return struct.unpack_from("<q", payload)[0], payload[8:].decode()


def pack_scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Scalars logged for a step."""
    return struct.pack("<q", step) + json.dumps(dict(values)).encode()


def unpack_scalars(payload: bytes) -> tuple[int, dict[str, float]]:
    """Step and values."""
    return struct.unpack_from("<q", payload)[0], json.loads(payload[8:])


def pack_histograms(step: int, source: str, histograms: Sequence[Histogram]) -> bytes:
    """All histograms of a step from one source, compressed: most counts are small."""
    rows = [[getattr(histogram, name) for name in _COUNTED] for histogram in histograms]
    # Names come from users: one that is no valid text must not end the record.
    name = source.encode("utf-8", "surrogatepass")
    return struct.pack("<qI", step, len(name)) + name + zlib.compress(json.dumps(rows).encode(), 1)


def unpack_histogram_step(payload: bytes) -> tuple[int, str, bytes]:
    """Step, source and packed histograms."""
    step, size = struct.unpack_from("<qI", payload)
    return step, payload[12 : 12 + size].decode("utf-8", "replace"), payload[12 + size :]


def unpack_histograms(step: int, packed: bytes, source: str) -> Iterator[Histogram]:
    """The packed histograms of one step as records; `source` says who counted it."""
    try:
        rows = json.loads(zlib.decompress(packed))
    except (zlib.error, ValueError) as error:
        raise RunError(f"the histograms of step {step} are damaged: {error}") from error
    for row in rows:
        counted = dict(zip(_COUNTED, row, strict=True))
        for sign in ("negative", "positive"):
            counted[sign] = tuple(counted[sign])
        yield Histogram(step=step, source=source, **counted)


def pack_record(kind: str, key: str, step: int, value: Mapping[str, object]) -> bytes:
    """Any other record, as JSON; one with the same kind and key replaces it."""
    return json.dumps([kind, key, step, dict(value)]).encode()


def unpack_record(payload: bytes) -> tuple[str, str, int, str]:
    """Kind, key, step, and the value still as JSON."""
    kind, key, step, value = json.loads(payload)
    return kind, key, step, json.dumps(value)
