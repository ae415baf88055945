"""What the training thread hands over, as bytes: the payloads of the tail's frames. No torch.

    kind       1 step with statistics, 2 scalars, 3 histograms, 4 any other record as JSON,
               5 scalars of a step (also loss, lr), 6 layout: the names of the parameters that rows
               of statistics stand for, 7 scalars under a tracker's own count, 8 a step from which
               on everything is forgotten, 9 norms by expert

All numbers are little-endian.
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

from gradsight.core import limits
from gradsight.core.documents import load_json
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
FORGET = 8
EXPERTS = 9

_STEP = struct.Struct("<qdddddd?BqHI")
_STEP_NUMBER = struct.Struct("<q")
_ROWS = struct.Struct("<BBI")
_OPTIONAL = ("loss", "lr", "total_norm", "clip_coef", "scale")

_NUMBERS = frozenset((float, int))
_COUNTED = tuple(field.name for field in dataclasses.fields(Histogram)[1:-1])
_STATISTICS = dataclasses.fields(ParameterStat)[2:]
COLUMNS = tuple(field.name for field in _STATISTICS)
"""The numbers of a parameter. Their order is the format's: a new one goes to the end."""
COUNTS = frozenset(field.name for field in _STATISTICS if int in get_args(field.type))
"""Columns of counts, where -1 stands for a count that is not known."""
OPTIONAL = frozenset(field.name for field in _STATISTICS if field.default is None)
"""Columns that are not always measured, where NaN stands for none."""


def pack_step(step: Step, layout: int, statistics: bytes) -> bytes:
    """One step; `statistics` comes from `pack_statistics`, or is empty."""
    values = [getattr(step, name) for name in _OPTIONAL]
    present = sum(1 << position for position, value in enumerate(values) if value is not None)
    numbers = [0.0 if value is None else value for value in values]
    gradient = step.gradient.encode()
    scalars = b""
    if step.scalars:
        scalars = json.dumps(dict(step.scalars)).encode()
    head = _STEP.pack(
        step.step,
        step.time,
        *numbers,
        step.skipped,
        present,
        layout,
        len(gradient),
        len(scalars),
    )
    return head + gradient + scalars + statistics


def unpack_step(payload: bytes) -> tuple[list[Any], dict[str, float], int, bytes]:
    """The fields of a step but its scalars, in their order; these; layout; packed statistics."""
    # Not as a record: a long run brings in a hundred thousand of them.
    number, time, *values, skipped, present, layout, gradient_size, scalars_size = (
        _STEP.unpack_from(payload)
    )
    known = [value if present >> place & 1 else None for place, value in enumerate(values)]
    scalars_start = _STEP.size + gradient_size
    statistics_start = scalars_start + scalars_size
    scalars = {}
    if scalars_size:
        scalars = _load_scalars(payload[scalars_start:statistics_start])
    gradient = payload[_STEP.size : scalars_start].decode()
    return [number, time, *known, skipped, gradient], scalars, layout, payload[statistics_start:]


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
    parts = [_ROWS.pack(mask, wide | (rows is not None) << 1, size)]
    if rows is not None:
        parts.append(np.asarray(rows, dtype="<u4").tobytes())
    parts += [columns[name].astype(kind).tobytes() for name in names]
    return b"".join(parts)


def check_statistics(packed: bytes, size: int) -> tuple[list[str], np.dtype[Any], int]:
    """The columns of packed statistics, their type and how many rows; an error where they lie.

    Asked before anything is made of them: six bytes may claim four thousand million rows.
    """
    if len(packed) < _ROWS.size:
        raise RunError("a row of statistics is damaged: it is cut off")
    mask, flags, count = _ROWS.unpack_from(packed)
    names = [name for position, name in enumerate(COLUMNS) if mask >> position & 1]
    kind = np.dtype("<f8" if flags & 1 else "<f4")
    has_rows = bool(flags & 2)
    if len(packed) != _ROWS.size + count * (4 * has_rows + len(names) * kind.itemsize):
        raise RunError("a row of statistics is damaged: its length does not fit")
    largest = count - 1
    if has_rows and count:
        largest = int(np.frombuffer(packed, "<u4", count, _ROWS.size).max())
    if count > size or largest >= size:
        raise RunError("a row of statistics is damaged: it has more parameters than there are")
    return names, kind, count


def unpack_statistics(
    packed: bytes, size: int
) -> tuple[npt.NDArray[np.intp], dict[str, npt.NDArray[np.float64]]]:
    """Rows of the layout (which has `size` parameters) and the columns measured for them."""
    names, kind, count = check_statistics(packed, size)
    has_rows = bool(packed[1] & 2)
    rows = np.arange(count)
    if has_rows:
        rows = np.frombuffer(packed, "<u4", count, _ROWS.size).astype(np.intp)
    values = np.frombuffer(packed, kind, offset=_ROWS.size + 4 * has_rows * count)
    table = values.reshape(len(names), count).astype(np.float64)
    return rows, dict(zip(names, table, strict=True))


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
    return number, _STEP_NUMBER.pack(number) + text


def unpack_layout(payload: bytes) -> tuple[int, str]:
    """Number and names, these still as JSON."""
    number: int = _STEP_NUMBER.unpack_from(payload)[0]
    return number, payload[_STEP_NUMBER.size :].decode()


def load_names(text: str) -> list[str]:
    """The names of a layout."""
    names = load_json(text.encode(), "the list of parameters")
    if not isinstance(names, list) or len(names) > limits.NAMES:
        raise RunError("the list of parameters is damaged: it is no list, or too long")
    if not all(isinstance(name, str) for name in names):
        raise RunError("the list of parameters is damaged: a name is no text")
    return names


def pack_forget(step: int) -> bytes:
    """A step from which on everything is forgotten."""
    return _STEP_NUMBER.pack(step)


def unpack_forget(payload: bytes) -> int:
    """The step."""
    step: int = _STEP_NUMBER.unpack(payload)[0]
    return step


def pack_scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Scalars logged for a step."""
    return _STEP_NUMBER.pack(step) + json.dumps(dict(values)).encode()


def unpack_scalars(payload: bytes) -> tuple[int, dict[str, float]]:
    """Step and values."""
    values = _load_scalars(payload[_STEP_NUMBER.size :])
    return _STEP_NUMBER.unpack_from(payload)[0], values


def _load_scalars(data: bytes) -> dict[str, float]:
    values = load_json(data, "a frame of scalars")
    if not isinstance(values, dict):
        raise ValueError("scalars are no object")
    # Names come from users: one that is no valid text must not end the record.
    return {_storable_text(name): _finite_or_not(value) for name, value in values.items()}


def _storable_text(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _finite_or_not(value: object) -> float:
    if not isinstance(value, float | int):
        raise ValueError(f"a scalar is {value!r}")
    return float(value)


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
    yield from load_histograms(step, histogram_text(step, packed), source)


def load_histograms(step: int, text: bytes, source: str) -> Iterator[Histogram]:
    """The same of what `histogram_text` gives."""
    name = f"the histograms of step {step}"
    rows = load_json(text, name)
    if not isinstance(rows, list):
        raise RunError(f"{name} are damaged: they are no list")
    for row in rows:
        if not _is_histogram(row):
            raise RunError(f"{name} are damaged: one of them has other fields or bins")
        parameter, low, negative, positive, zero, nan, inf, underflow, size, sampled = row
        yield Histogram(
            step,
            parameter,
            low,
            tuple(map(float, negative)),
            tuple(map(float, positive)),
            float(zero),
            float(nan),
            float(inf),
            float(underflow),
            size,
            sampled,
            source,
        )


def _is_histogram(row: object) -> bool:
    """Whether a list has the fields of a histogram, of their types, with bins that can be."""
    # By hand and not by `read_record`: a report looks at hundreds of thousands.
    if not isinstance(row, list) or len(row) != len(_COUNTED):
        return False
    kinds = tuple(map(type, row))
    if kinds[0] not in (str, type(None)) or kinds[2:4] != (list, list):
        return False
    if {kinds[1], *kinds[-2:]} != {int} or not _NUMBERS.issuperset(kinds[4:-2]):
        return False
    negative, positive = row[2:4]
    if not _NUMBERS.issuperset(map(type, negative + positive)):
        return False
    # Powers of two that a double can hold.
    fits = row[1] >= -1100 and row[1] + len(positive) <= 1023
    return fits and len(negative) == len(positive) and max(map(abs, row[-2:])) <= limits.NUMBER


def histogram_text(step: int, packed: bytes) -> bytes:
    """Decompressed, up to a limit: two kilobytes can unpack to two megabytes, and so on."""
    name = f"the histograms of step {step}"
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(packed, limits.HISTOGRAM_BYTES)
    except zlib.error as error:
        raise RunError(f"{name} are damaged: {error}") from error
    if not unpacking.eof:
        raise RunError(f"{name} are damaged, or more than {limits.HISTOGRAM_BYTES} bytes")
    return text


def pack_record(kind: str, key: str, step: int, value: Mapping[str, object]) -> bytes:
    """Any other record, as JSON; one with the same kind and key replaces it."""
    return json.dumps([kind, key, step, dict(value)]).encode()


def unpack_record(payload: bytes) -> tuple[str, str, int, str]:
    """Kind, key, step, and the value still as JSON."""
    kind, key, step, value = load_json(payload, "a record")
    if not (isinstance(kind, str) and isinstance(key, str) and type(step) is int):
        raise ValueError("its kind, key or step is of another type")
    if abs(step) > limits.NUMBER:
        raise ValueError(f"its step is {step}")
    return _storable_text(kind), _storable_text(key), step, json.dumps(value)


def pack_experts(step: int, norms: Mapping[str, npt.NDArray[np.float64]]) -> bytes:
    """The norms of experts by the name of their group."""
    packed = {name: _pack_norms(values) for name, values in norms.items()}
    sizes = json.dumps([[name, len(each)] for name, each in packed.items()]).encode()
    return struct.pack("<qI", step, len(sizes)) + sizes + b"".join(packed.values())


def _pack_norms(values: npt.NDArray[np.float64]) -> bytes:
    """The bytes of a number, then the numbers: four each, where all of them fit."""
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype("<f4")
    fits = np.array_equal(np.isfinite(narrow), np.isfinite(values))
    fits = fits and np.array_equal(narrow == 0, values == 0)
    kept = narrow if fits else values.astype("<f8")
    return bytes([kept.itemsize]) + kept.tobytes()


def unpack_experts(payload: bytes) -> tuple[int, list[tuple[str, bytes]]]:
    """Step, and the packed norms of each group."""
    step, size = struct.unpack_from("<qI", payload)
    start = 12 + size
    groups = []
    for name, length in load_json(payload[12:start], "the norms of experts"):
        if not isinstance(name, str) or type(length) is not int or length < 1:
            raise ValueError("a group of experts has another form")
        groups.append((_storable_text(name), payload[start : start + length]))
        start += length
    if start != len(payload):
        raise ValueError("its length does not fit")
    return step, groups


def load_experts(packed: bytes) -> list[float]:
    """The norms of one group."""
    width = packed[0] if packed else 0
    if width not in (4, 8) or (len(packed) - 1) % width:
        raise RunError("the norms of experts are damaged: their length does not fit")
    norms: list[float] = np.frombuffer(packed, f"<f{width}", offset=1).tolist()
    return norms
