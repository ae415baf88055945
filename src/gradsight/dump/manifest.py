"""The manifest: JSON that says all about a dump, so that reading never opens a pickle. No torch.

A dump without a manifest is no dump. The manifest is written last, carries a checksum of itself,
and is refused when malformed: it may come from a stranger.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsight.errors import RunError, WrongPlace
from gradsight.values.plain import plain

NAME = "manifest.json"
FORMAT = "gradsight-dump"
VERSION = 1
_BETWEEN = "; "
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
    ranks_disagree: bool = False
    """Ranks held different values or none: stored is that of the first rank that had one."""

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
    return json.dumps(
        {**body, "crc32": _checksum(body)}, ensure_ascii=False, allow_nan=False
    ).encode()


def read(folder: Path) -> Manifest:
    """The manifest of a dump folder; refused unless every part of it makes sense."""
    path = folder / NAME
    if folder.parent.name.endswith(".partial"):
        raise WrongPlace(
            f"{folder} is still being written, or was left behind unfinished: it is not a dump"
        )
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(_no_dump(folder)) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as a manifest: {error}") from None
    return decode(body, path)


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
    try:
        return _typed(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path} is malformed: {error}") from None


def _typed(body: dict[str, Any]) -> Manifest:
    files = {
        name: Stored(_count(stored["bytes"]), _count(stored["frame_crc32"]))
        for name, stored in body["files"].items()
    }
    # A manifest may come from a stranger: a name with a path in it would read any file.
    if unsafe := [name for name in files if name != Path(name).name or name in {"", ".", ".."}]:
        raise ValueError(f"the file name {unsafe[0]!r} leads out of the dump's folder")
    rest = {
        key: body[key]
        for key in Manifest.__slots__
        if key not in {"tensors", "files", "parameters", "clip_coef", "scale"}
    }
    return Manifest(
        **rest,
        tensors={name: _entry(name, entry, files) for name, entry in body["tensors"].items()},
        files=files,
        parameters=tuple(body["parameters"]),
        clip_coef=None if body["clip_coef"] is None else float(body["clip_coef"]),
        scale=None if body["scale"] is None else float(body["scale"]),
    )


def _entry(name: str, body: dict[str, Any], files: Mapping[str, Stored]) -> Entry:
    chunks = tuple(
        Chunk(**{**chunk, "offsets": _box(chunk["offsets"]), "sizes": _box(chunk["sizes"])})
        for chunk in body["chunks"]
    )
    lists = {
        "shape": _box(body["shape"]),
        "parameter_shape": _box(body["parameter_shape"]),
        "placements": tuple(body["placements"]),
    }
    entry = Entry(**{**body, **lists, "chunks": chunks})
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has the unknown dtype {entry.dtype!r}")
    for chunk in chunks:
        _check_chunk(name, entry, chunk, files)
    if not tiles(entry.shape, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"the chunks of {name} do not cover it exactly once")
    return entry


def _check_chunk(name: str, entry: Entry, chunk: Chunk, files: Mapping[str, Stored]) -> None:
    """A chunk must lie inside its tensor and inside its file."""
    known = chunk.file in files
    if not known or _count(chunk.offset) + _count(chunk.bytes) > files[chunk.file].bytes:
        raise ValueError(f"a chunk of {name} lies outside of its file {chunk.file!r}")
    if chunk.bytes != math.prod(chunk.sizes) * ITEM_BYTES[entry.dtype]:
        raise ValueError(
            f"a chunk of {name} has {chunk.bytes} bytes, its sizes {chunk.sizes} say otherwise"
        )


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
    """Whether no two boxes overlap; each is compared only with those that reach its rows."""
    near: list[Box] = []
    for box in sorted(boxes):
        near = [
            other
            for other in near
            if other[0][:1] >= box[0][:1] or other[0][0] + other[1][0] > box[0][0]
        ]
        if any(_overlap(box, other) for other in near):
            return False
        near.append(box)
    return True


def _overlap(one: Box, other: Box) -> bool:
    spans = zip(*one, *other, strict=True)
    return all(
        start < begin + length and begin < start + size for start, size, begin, length in spans
    )


def _box(numbers: list[int]) -> tuple[int, ...]:
    return tuple(_count(number) for number in numbers)


def _count(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return number


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
