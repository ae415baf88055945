"""The tail: what is read is a beginning of what was written, and damage is never taken for an end."""

import json
import os
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsight import GradsightError
from gradsight.errors import RunError
from gradsight.store import schema
from gradsight.store import tail_format as frames
from gradsight.store.tail_file import HEADER, Frame, TailReader, pack_frame, pack_header
from gradsight.values.histograms import Histogram
from gradsight.values.steps import Step
from store import flips

PAYLOADS = st.lists(st.binary(max_size=60), min_size=1, max_size=6)
FIRST = 8


@contextmanager
def opened(data: bytes) -> Iterator[TailReader]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield TailReader(file.fileno(), "run.sqlite-tail")


def tail_of(payloads: list[bytes]) -> tuple[bytes, list[Frame], list[int]]:
    """A tail, its frames, and where each ends."""
    made = [(FIRST + place, 1 + place % 7, payload) for place, payload in enumerate(payloads)]
    data = pack_header(5, FIRST)
    ends = [len(data)]
    for frame in made:
        data += pack_frame(*frame)
        ends.append(len(data))
    return data, made, ends


@given(PAYLOADS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_tail_that_is_cut_off_ends_with_its_last_whole_frame(
    payloads: list[bytes], data: st.DataObject
) -> None:
    whole, made, ends = tail_of(payloads)
    cut = data.draw(st.integers(0, len(whole)))
    zeros = data.draw(st.integers(0, 3000))
    kept = sum(end <= cut for end in ends[1:])
    tails = [whole[:cut]]
    # A disk writes sectors: the header is within the first, and a checksum hardly ever in two.
    in_checksum = any(end - 4 < cut < end for end in ends[1:])
    if cut == 0 or (cut >= HEADER.size and not in_checksum):
        tails.append(whole[:cut] + bytes(zeros))
    for tail in tails:
        with opened(tail) as reader:
            assert list(reader.frames()) == made[:kept]
            assert reader.is_torn() == (len(tail) > reader.position)


@given(PAYLOADS, st.data())
@settings(max_examples=120, deadline=None)
def test_a_changed_byte_is_never_taken_for_an_end(
    payloads: list[bytes], data: st.DataObject
) -> None:
    whole, made, _ = tail_of(payloads)
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    found: list[Frame] = []
    with pytest.raises(RunError, match="damaged"), opened(bytes(changed)) as reader:
        found += reader.frames()
    assert found == made[: len(found)]


def test_a_length_that_was_changed_is_damage_and_no_torn_end() -> None:
    """It would lead beyond the end of the file, as a frame that was cut off does."""
    whole, _, ends = tail_of([b"first", b"second"])
    changed = bytearray(whole)
    changed[ends[0] + 2] = 3
    with pytest.raises(RunError, match="the head of a frame"), opened(bytes(changed)) as reader:
        list(reader.frames())


def test_frames_that_are_missing_or_twice() -> None:
    whole, made, ends = tail_of([b"first", b"second", b"third"])
    for tail in (
        whole[: ends[1]] + whole[ends[2] :],
        whole[: ends[1]] + whole[ends[0] :],
    ):
        found: list[Frame] = []
        with pytest.raises(RunError, match=r"frame \d+ follows frame 8"), opened(tail) as reader:
            found += reader.frames()
        assert found == made[:1]


def test_a_tail_is_read_on_as_it_grows(tmp_path: Path) -> None:
    whole, made, ends = tail_of([b"a" * 10, b"b" * 10, b"c" * 10])
    file = tmp_path / "tail"
    file.write_bytes(b"")
    handle = os.open(file, os.O_RDONLY)
    reader = TailReader(handle, "tail")
    seen: list[Frame] = []
    for end in (0, 5, HEADER.size, ends[1] - 1, ends[1], ends[2] + 3, len(whole)):
        file.write_bytes(whole[:end])
        seen += reader.frames()
        assert seen == made[: sum(each <= end for each in ends[1:])]
    os.close(handle)


@given(st.integers(0, 10), st.binary(max_size=300))
@settings(max_examples=120, deadline=None)
def test_a_payload_of_anything_is_taken_or_refused(kind: int, payload: bytes) -> None:
    connection = sqlite3.connect(":memory:")
    schema.create_tables(connection, 1)
    try:
        schema.apply(connection, [(1, kind, payload)])
    except GradsightError:
        assert schema.read_meta(connection)["last_frame"] == 0
    connection.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(json_values)
@settings(max_examples=100, deadline=None)
def test_structured_nonsense_in_every_place_of_json(value: object) -> None:
    text = json.dumps(value).encode()
    for read in (
        lambda: frames.unpack_record(text),
        lambda: frames.unpack_scalars(bytes(8) + text),
        lambda: frames.load_names(text.decode()),
        lambda: list(frames.unpack_histograms(1, zlib.compress(text), "watch")),
    ):
        # What `schema.apply` makes an error of ours of.
        with suppress(GradsightError, ValueError, TypeError):
            read()


@given(st.binary(max_size=200), st.integers(0, 50))
@settings(max_examples=120, deadline=None)
def test_statistics_of_anything(packed: bytes, size: int) -> None:
    names = [f"p{number}" for number in range(size)]
    try:
        found = list(frames.statistics(3, names, packed))
    except GradsightError:
        return
    assert all(stat.parameter in names for stat in found)


numbers = st.floats(width=32, allow_nan=True)


@given(st.lists(numbers, min_size=1, max_size=20), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_statistics_come_back(values: list[float], wide: bool, some: bool) -> None:
    names = [f"p{number}" for number in range(len(values) + 3)]
    rows = [place + 3 for place in range(len(values))] if some else None
    columns = {"l2": np.array(values), "max_abs": np.zeros(len(values))}
    packed = frames.pack_statistics(rows, columns, wide)
    found = list(frames.statistics(0, names, packed))
    np.testing.assert_equal([stat.l2 for stat in found], values)
    assert [stat.parameter for stat in found] == [names[row] for row in rows or range(len(values))]


@given(st.floats(), st.text(max_size=10), st.dictionaries(st.text(max_size=5), st.floats()))
@settings(max_examples=100, deadline=None)
def test_steps_come_back(loss: float, gradient: str, scalars: dict[str, float]) -> None:
    step = Step(3, 1.5, loss=loss, gradient=gradient, scalars=scalars)
    payload = frames.pack_step(step, 7, b"rest")
    fields, values, layout, packed = frames.unpack_step(payload)
    assert repr(Step(*fields, values)) == repr(step)
    assert (layout, packed) == (7, b"rest")


def test_histograms_whose_bins_cannot_be() -> None:
    for low, size in ((10**6, 1), (-(10**6), 1), (1000, 100)):
        bins = tuple([1.0] * size)
        histogram = Histogram(1, None, low, bins, bins, 0.0, 0.0, 0.0, 0.0, 2, 2)
        payload = frames.unpack_histogram_step(frames.pack_histograms(1, "", [histogram]))
        with pytest.raises(RunError, match="bins"):
            list(frames.unpack_histograms(1, payload[2], "watch"))


def test_damage_to_any_file_of_a_run() -> None:
    """A few tries; `python tests/store/flips.py` makes hundreds."""
    for name, counts in flips.campaign(tries=6, seed=5).items():
        assert not [result for result in counts if result.startswith("FAILED")], (name, counts)
        assert counts["refused"], (name, counts)
