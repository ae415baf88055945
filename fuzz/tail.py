"""run.sqlite-tail: as it is, and with frames whose checksums were put right again."""

import functools
import struct
import zlib
from pathlib import Path

from fuzz.mutate import scratch

from gradsight import open_run
from gradsight.core import rundir
from gradsight.errors import GradsightError
from gradsight.store.tail_file import HEADER, MAGIC, pack_frame, pack_header

_HEAD = struct.Struct("<IBQI")


def target(data: bytes) -> None:
    """Lay it over a record, and read what comes of it."""
    errors = []
    for tail in (data, _put_right(data)):
        try:
            _read(tail)
        except GradsightError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _read(tail: bytes) -> None:
    folder, _ = _folder_and_tail()
    (folder / rundir.TAIL).write_bytes(tail)
    run = open_run(folder)
    try:
        for name in (
            "steps",
            "parameter_stats",
            "histograms",
            "scalars",
            "findings",
            "expert_stats",
        ):
            for _ in getattr(run, name)():
                pass
    finally:
        run.close()


def _put_right(data: bytes) -> bytes:
    """The same frames with numbers and checksums that fit, as far as they can be followed."""
    _, whole = _folder_and_tail()
    _, run, first, _ = HEADER.unpack_from(whole)
    made = pack_header(run, first)
    position = HEADER.size
    while position + _HEAD.size <= len(data) and data[:4] == MAGIC[:4]:
        length, kind, _, _ = _HEAD.unpack_from(data, position)
        payload = data[position + _HEAD.size :][:length]
        made += pack_frame(first, kind, payload)
        first += 1
        position += _HEAD.size + length + 4
    return made


def corpus() -> list[bytes]:
    """One frame of every kind, and what lies inside of each."""
    return [_folder_and_tail()[1]]


@functools.cache
def _folder_and_tail() -> tuple[Path, bytes]:
    import numpy as np

    from gradsight.store import tail_format as frames
    from gradsight.store.store import open_store
    from gradsight.values.histograms import Histogram
    from gradsight.values.steps import Step

    folder = scratch()
    store = open_store(folder)
    values = np.array([1.0, 2.0])
    packed = frames.pack_statistics(None, {"l2": values, "max_abs": values / 2})
    for number in range(3):
        store.add_step(Step(number, 1.0, loss=2.0, scalars={"x": 0.5}), ["a", "b"], packed)
    store.add_scalars(1, {"y": 2.0})
    store.add_step_scalars(1, {"loss": 2.0, "z": 1.0})
    store.add_tracked(2, {"epoch": 0.5})
    store.add_experts(1, {"a.weight": np.array([1.0, 0.0])})
    store.add_histograms(1, [Histogram(1, None, -3, (1.0,), (2.0,), 4.0, 0.0, 0.0, 0.0, 7, 7)])
    store.add_record("problem", "k", 1, {"key": "k", "message": "", "first_step": 1, "count": 1})
    store.forget_from(2)
    store.flush()
    tail = (folder / rundir.TAIL).read_bytes()
    record = (folder / rundir.RECORD).read_bytes()
    store.close()
    (folder / rundir.RECORD).write_bytes(record)
    assert zlib.crc32(tail)
    return folder, tail
