"""A manifest may come from a stranger: whatever does not make sense in it is refused, with a
reason.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsight.dump import manifest as manifest_module
from gradsight.dump.manifest import _checksum, encode, read, tiles
from gradsight.errors import RunError


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it a right checksum again."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["crc32"]
    change(body)
    path.write_text(json.dumps({**body, "crc32": _checksum(body)}))


def entry(body: dict[str, Any]) -> dict[str, Any]:
    return body["tensors"]["0.weight"]


def chunk(body: dict[str, Any]) -> dict[str, Any]:
    return entry(body)["chunks"][0]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (
        lambda body: body.update(format="x"),
        "is not the manifest of a gradient dump",
    ),
    "a newer version": (
        lambda body: body.update(version=2),
        "has format version 2; this Gradsight reads version 1",
    ),
    "a path outside": (
        lambda body: body["files"].update({"../x": {"bytes": 1, "frame_crc32": 0}}),
        "the file name '../x' leads out of the dump's folder",
    ),
    "an absolute path": (
        lambda body: body["files"].update({"/etc/passwd": {"bytes": 1, "frame_crc32": 0}}),
        "the file name '/etc/passwd' leads out of the dump's folder",
    ),
    "an unlisted file": (
        lambda body: chunk(body).update(file="other"),
        "a chunk of 0.weight lies outside of its file 'other'",
    ),
    "beyond the file": (
        lambda body: chunk(body).update(offset=10**9),
        "lies outside of its file '__0_0.distcp'",
    ),
    "a negative place": (
        lambda body: chunk(body).update(offset=-1),
        "has a negative size or place",
    ),
    "an unknown dtype": (
        lambda body: entry(body).update(dtype="int4"),
        "0.weight has the unknown dtype 'int4'",
    ),
    "wrong bytes": (
        lambda body: chunk(body).update(bytes=8),
        r"a chunk of 0.weight has 8 bytes, its sizes \(7, 5\) say otherwise",
    ),
    "a hole": (
        lambda body: entry(body).update(shape=[8, 5]),
        "the chunks of 0.weight do not cover it exactly once",
    ),
    "twice": (
        lambda body: entry(body)["chunks"].append(chunk(body)),
        "do not cover it exactly once",
    ),
    "a huge tensor": (
        lambda body: entry(body).update(shape=[10**12, 5]),
        "do not cover it exactly once",
    ),
    "a missing part": (
        lambda body: body.pop("step"),
        r"is malformed: .*fields of a Manifest \('step'\)",
    ),
    "an odd part": (
        lambda body: entry(body).update(surprise=1),
        r"is malformed: .*0.weight.*fields of a Entry \('surprise'\)",
    ),
    "shared bytes": (
        lambda body: body["tensors"].update(copy=entry(body)),
        "a chunk of copy lies where another one lies",
    ),
    "endless dimensions": (
        lambda body: entry(body).update(parameter_shape=[1] * 100),
        "0.weight has the shape",
    ),
    "beyond 64 bits": (
        lambda body: entry(body).update(shape=[2**40, 2**40, 0], chunks=[]),
        "0.weight has the shape",
    ),
    "a number without end": (
        lambda body: body.update(step=10**30),
        "step should be a whole number",
    ),
    "no date": (lambda body: body.update(created=1e300), "which no clock shows"),
    "no text": (lambda body: body.update(gradient=["x"]), "gradient should be text"),
    "another kind": (lambda body: body.update(kind="x"), "is full or sampled, and not 'x'"),
    "reasons": (lambda body: body.update(left_out={"w": 3}), r"left_out\['w'\] should be text"),
    "no table": (lambda body: body.update(tensors=[]), "is malformed"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_refused(case: str, dumped: Path) -> None:
    change, text = CHANGES[case]
    rewrite(dumped, change)
    with pytest.raises(RunError, match=text):
        read(dumped)


def test_it_comes_back_as_it_was(dumped: Path) -> None:
    manifest = read(dumped)
    (dumped / "manifest.json").write_bytes(encode(manifest))
    assert read(dumped) == manifest


def test_changed_by_hand(dumped: Path) -> None:
    path = dumped / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(RunError, match=r"manifest.json is damaged: its checksum does not match"):
        read(dumped)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe"])
def test_no_json(content: bytes, dumped: Path) -> None:
    (dumped / "manifest.json").write_bytes(content)
    with pytest.raises(
        RunError, match=r"cannot be read as JSON|is not the manifest of a gradient dump"
    ):
        read(dumped)


def test_many_shards_are_checked_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """In about as many comparisons as there are shards, not its square."""
    compared = 0

    def counted(one: manifest_module.Box, other: manifest_module.Box) -> bool:
        nonlocal compared
        compared += 1
        return overlap(one, other)

    overlap = manifest_module._overlap
    monkeypatch.setattr(manifest_module, "_overlap", counted)
    rows = [((row, 0), (1, 5)) for row in range(20_000)]
    assert tiles((20_000, 5), rows[::-1])
    assert not tiles((20_000, 5), [*rows[:-1], ((7, 0), (1, 5))])
    assert compared < 3 * len(rows)


spans = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(
    st.tuples(st.integers(0, 3), st.integers(0, 3)), st.lists(st.tuples(spans, spans), max_size=4)
)
def test_boxes_against_counting(
    shape: tuple[int, int], boxes: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    """The slow twin: count how often each entry is covered."""
    pairs = [(tuple(one[0] for one in box), tuple(one[1] for one in box)) for box in boxes]
    counts = np.zeros((8, 8), dtype=int)
    for offsets, sizes in pairs:
        for where in itertools.product(
            *(range(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        ):
            counts[where] += 1
    inside = counts[: shape[0], : shape[1]]
    fits = all(
        start + size <= length
        for pair in pairs
        for start, size, length in zip(*pair, shape, strict=True)
    )
    assert tiles(shape, pairs) == (fits and bool((inside == 1).all()))


def test_many_chunks_take_no_time() -> None:
    """A grid of 90,000 pieces is seen to be one; as many that overlap, or are tangled, are not."""
    side = 300
    grid = [((row, column), (1, 1)) for row in range(side) for column in range(side)]
    assert tiles((side, side), grid)
    twice = [*grid[:-1], grid[0]]
    assert not tiles((side, side), twice)
    # Four around one in the middle, which no straight cut parts, a thousand times in a row.
    wheel = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    row = [((y, x + 3 * place), size) for place in range(1000) for (y, x), size in wheel]
    assert tiles((3, 3000), row)
    same = [((0, 0), (1, side)) for _ in range(side)]
    assert not tiles((side, side), same)
