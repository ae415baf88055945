"""The manifest: JSON that says all about a dump, so that reading never opens a pickle. No torch.

A dump without a manifest is no dump. The manifest is written last, carries a checksum of itself,
and is refused when malformed: it may come from a stranger.
"""

import itertools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsight.core import limits
from gradsight.core.documents import load_json, refuse_large
from gradsight.core.places import read_file
from gradsight.core.records import read_record
from gradsight.errors import RunError, WrongPlace
from gradsight.values.plain import plain

NAME = "manifest.json"
FORMAT = "gradsight-dump"
VERSION = 1
_BETWEEN = "; "
_LAST_SECOND = 253_402_300_800.0
"""The end of the year 9999, beyond which Python has no dates."""
_MOST_WORK = 16
"""How often each chunk may be looked at to see whether chunks overlap; a grid needs as many looks
as it has dimensions."""
SCHEDULE = "schedule"
"""The reason of a dump that was due, and of which nothing was found."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16,
    "complex64": 8, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and where its bytes lie in `file`: row-major, little-endian."""

    file: str
    offset: int
    bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    # torch's reader does not notice a flipped byte.
    crc32: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One gradient: its shape as dumped, the parameter's shape, how it was sharded, its chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    parameter_shape: tuple[int, ...]
    layout: str = "strided"
    """The layout the gradient had; what is stored is always dense."""
    source: str = "grad"
    mesh: str | None = None
    placements: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of the dump: its length, and a checksum of the bytes between the chunks."""

    bytes: int
    frame_crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about one dump."""

    kind: str
    step: int
    created: float
    world_size: int
    gradient: str
    tensors: Mapping[str, Entry]
    files: Mapping[str, Stored]
    parameters: tuple[str, ...]
    """All names of the model, in its order, also of parameters without a gradient."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied parameters, and the name under which the gradient stands."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Gradients that exist but could not be had whole, and why."""
    reason: str = SCHEDULE
    clip_coef: float | None = None
    scale: float | None = None
    save_first_n: int | None = None

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings that this dump was made for."""
        if self.reason == SCHEDULE:
            return ()
        return tuple(_code(reason) for reason in self.reason.split(_BETWEEN))

    @property
    def bytes(self) -> int:
        """What the gradients take."""
        return sum(entry.bytes for entry in self.tensors.values())


def joined_reasons(reasons: Sequence[str]) -> str:
    """Why a dump was made, in one line: its findings, each code once, or else the schedule.

    >>> joined_reasons(["schedule", "GS201 gradient spike", "GS201 gradient spike"])
    'GS201 gradient spike'
    >>> joined_reasons([])
    'schedule'
    """
    found: dict[str, str] = {}
    for reason in reasons:
        if reason != SCHEDULE:
            found.setdefault(_code(reason), reason)
    return _BETWEEN.join(found.values()) or SCHEDULE


def _code(reason: str) -> str:
    return reason.split(" ", 1)[0]


def encode(manifest: Manifest) -> bytes:
    """The manifest as the text that is written, with its own checksum."""
    body = {"format": FORMAT, "version": VERSION, **plain(manifest)}
    text = json.dumps(
        {**body, "crc32": _checksum(body)}, ensure_ascii=False, allow_nan=False
    ).encode()
    # What nobody could read is not written: better no dump than one that cannot be opened.
    refuse_large(text, NAME)
    return text


def read(folder: Path) -> Manifest:
    """The manifest of a dump folder; refused unless every part of it makes sense."""
    path = folder / NAME
    if folder.parent.name.endswith(".partial"):
        raise WrongPlace(
            f"{folder} is still being written, or was left behind unfinished: it is not a dump"
        )
    try:
        data = read_file(folder, NAME, limits.DOCUMENT_BYTES)
    except FileNotFoundError:
        raise RunError(_no_dump(folder)) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read as a manifest: {error.strerror}") from None
    return decode(load_json(data, str(path)), path)


def decode(body: Any, path: Path) -> Manifest:
    """Check a parsed manifest and give it its types."""
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise RunError(f"{path} is not the manifest of a gradient dump")
    if body.get("version") != VERSION:
        raise WrongPlace(
            f"{path} has format version {body.get('version')!r}; this Gradsight reads version "
            f"{VERSION}"
        )
    if body.pop("crc32", None) != _checksum(body):
        raise RunError(f"{path} is damaged: its checksum does not match")
    fields = {key: value for key, value in body.items() if key not in ("format", "version")}
    manifest = read_record(Manifest, fields, str(path))
    if fault := _fault(manifest):
        raise RunError(f"{path} is malformed: {fault}")
    return manifest


def _fault(manifest: Manifest) -> str | None:
    """What does not make sense in a manifest whose every value is of its type."""
    if manifest.kind not in ("full", "sampled"):
        return f"a dump is full or sampled, and not {manifest.kind!r}"
    if not 0 <= manifest.created < _LAST_SECOND:
        return f"it was created at {manifest.created}, which no clock shows"
    if manifest.step < 0 or manifest.world_size < 1:
        return f"step {manifest.step} of {manifest.world_size} ranks cannot be"
    for name in manifest.files:
        # A manifest may come from a stranger: a name with a path in it would read any file.
        if name != Path(name).name or name in {"", ".", "..", NAME}:
            return f"the file name {name!r} leads out of the dump's folder"
    for name, entry in manifest.tensors.items():
        if fault := _fault_of_entry(name, entry, manifest.files):
            return fault
    return _fault_of_places(manifest)


def _fault_of_entry(name: str, entry: Entry, files: Mapping[str, Stored]) -> str | None:
    if entry.dtype not in ITEM_BYTES:
        return f"{name} has the unknown dtype {entry.dtype!r}"
    for shape in (entry.shape, entry.parameter_shape):
        # What is empty in one dimension has no bytes, but numpy wants to count the others.
        volume = math.prod(max(1, length) for length in shape) * ITEM_BYTES[entry.dtype]
        wrong = len(shape) > limits.DIMENSIONS or min(shape, default=0) < 0
        if wrong or volume > limits.NUMBER:
            return f"{name} has the shape {shape}, which no tensor has"
    for chunk in entry.chunks:
        if fault := _fault_of_chunk(name, entry, chunk, files):
            return fault
    if not tiles(entry.shape, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]):
        return f"the chunks of {name} do not cover it exactly once"
    return None


def _fault_of_chunk(
    name: str, entry: Entry, chunk: Chunk, files: Mapping[str, Stored]
) -> str | None:
    """A chunk must lie inside its tensor and inside its file."""
    if min(chunk.offset, chunk.bytes, *chunk.offsets, *chunk.sizes) < 0:
        return f"a chunk of {name} has a negative size or place"
    if chunk.file not in files or chunk.offset + chunk.bytes > files[chunk.file].bytes:
        return f"a chunk of {name} lies outside of its file {chunk.file!r}"
    if chunk.bytes != math.prod(chunk.sizes) * ITEM_BYTES[entry.dtype]:
        return f"a chunk of {name} has {chunk.bytes} bytes, its sizes {chunk.sizes} say otherwise"
    return None


def _fault_of_places(manifest: Manifest) -> str | None:
    """Chunks share no bytes of a file: so all gradients together are no larger than the files."""
    for file, chunks in chunks_by_file(manifest).items():
        end = 0
        for chunk, name in chunks:
            if chunk.offset < end:
                return f"a chunk of {name} lies where another one lies in {file!r}"
            end = chunk.offset + chunk.bytes
    return None


def chunks_by_file(manifest: Manifest) -> dict[str, list[tuple[Chunk, str]]]:
    """The chunks of each file in their order, with the names of their gradients."""
    chunks: dict[str, list[tuple[Chunk, str]]] = {name: [] for name in manifest.files}
    for name, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            chunks[chunk.file].append((chunk, name))
    for found in chunks.values():
        found.sort(key=lambda pair: (pair[0].offset, pair[0].bytes))
    return chunks


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def tiles(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether boxes cover a shape exactly once.

    >>> tiles((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))])
    True
    >>> tiles((4,), [((0,), (2,)), ((1,), (2,))])
    False
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        if any(
            start + size > length for start, size, length in zip(offsets, sizes, shape, strict=True)
        ):
            return False
    filled = [box for box in boxes if math.prod(box[1])]
    return sum(math.prod(sizes) for _, sizes in filled) == math.prod(shape) and _disjoint(filled)


def _disjoint(boxes: list[Box]) -> bool:
    """Whether no two boxes overlap: parted by straight cuts that cut no box, again and again.

    The pieces of a sharded tensor lie in a grid, which a few cuts part. What no cut parts is
    compared each with each, if it is little; a stranger's tangle of thousands is refused.
    """
    waiting = [boxes]
    work = 0
    while waiting:
        group = waiting.pop()
        work += len(group)
        if len(group) < 2:
            continue
        parts = _parted(group)
        if len(parts) > 1:
            waiting += parts
        elif len(group) > limits.CHUNKS_ENTANGLED or _any_overlap(group):
            return False
        if work > _MOST_WORK * len(boxes):
            return False
    return True


def _parted(boxes: list[Box]) -> list[list[Box]]:
    """Boxes in groups between cuts along the first axis that has any."""
    for axis in range(len(boxes[0][0])):
        parts: list[list[Box]] = []
        reach = -1
        for box in sorted(boxes, key=lambda box: box[0][axis]):
            if box[0][axis] >= reach:
                parts.append([])
            parts[-1].append(box)
            reach = max(reach, box[0][axis] + box[1][axis])
        if len(parts) > 1:
            return parts
    return [boxes]


def _any_overlap(boxes: list[Box]) -> bool:
    return any(_overlap(one, other) for one, other in itertools.combinations(boxes, 2))


def _overlap(one: Box, other: Box) -> bool:
    spans = zip(*one, *other, strict=True)
    return all(
        start < begin + length and begin < start + size for start, size, begin, length in spans
    )


def _checksum(body: dict[str, Any]) -> int:
    """The checksum of everything else in a manifest, whatever its white space."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _no_dump(folder: Path) -> str:
    expected = "expected a folder such as RUN/gradient_dumper/step0/full_gradients"
    if not folder.exists():
        return f"{folder} does not exist; {expected}"
    if (folder / ".metadata").exists():
        return (
            f"{folder} is a checkpoint without our {NAME}; torch.distributed.checkpoint may read it"
        )
    return f"{folder} is not a gradient dump (no {NAME}); {expected}"
