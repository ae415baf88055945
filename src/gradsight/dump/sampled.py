"""Sampled dumps: the first rows of each gradient in a safetensors file, written by rank 0."""

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from gradsight.core import files
from gradsight.core.group import ProcessGroup
from gradsight.dump.full import Record, Shard
from gradsight.dump.gradients import Row
from gradsight.dump.manifest import Chunk, Stored
from gradsight.dump.plan import Offer, Plan
from gradsight.dump.staging import Buffer, Span

KEY = "gradient"
LONGEST = 180
"""Bytes of a file name that come from the parameter's name; file systems allow 255 in all."""
WORDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""What safetensors calls a dtype."""
SPLIT = {
    "complex128": ("F64", 2),
    "complex32": ("F16", 2),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
}
"""Dtypes it does not know: what they are stored as, and in how many parts of a last dimension."""


def bring_together(
    ranks: ProcessGroup, buffer: Buffer, spans: Sequence[Span], plan: Plan
) -> list[torch.Tensor]:
    """Every rank's chosen rows, on rank 0; nothing else goes over the wire."""
    parts = [
        buffer.view(span).reshape(-1).view(torch.uint8) for span in spans if span.stop > span.start
    ]
    mine = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")
    return ranks.collect(mine, plan.lengths)


def write_samples(
    folder: Path, plan: Plan, offers: Sequence[Offer], parts: Sequence[torch.Tensor], first_n: int
) -> Shard:
    """Put the rows of each gradient together and write them.

    A file's name has the number of rows that were asked for, so that whoever wants it knows the
    name; how many there were is in the manifest.
    """
    whole: dict[str, torch.Tensor] = {}
    rows: dict[str, Row] = {}
    for offer, indices, part in zip(offers, plan.choices, parts, strict=True):
        position = 0
        for index in indices:
            row = offer.rows[index]
            piece = part[position : position + row.bytes]
            position += row.bytes
            rows.setdefault(row.name, row)
            _insert(whole, row, piece)
    stems = file_stems(name for name in plan.parameters if name in rows)
    written = [
        _write_one(folder / f"{stem}_first{first_n}.safetensors", rows[name], whole[name])
        for name, stem in stems.items()
    ]
    # All at once at the end: with a file for each parameter, one wait each would be slow.
    files.sync_files(folder / name for _, (name, _) in written)
    return Shard(tuple(record for record, _ in written), tuple(stored for _, stored in written))


def _insert(whole: dict[str, torch.Tensor], row: Row, piece: torch.Tensor) -> None:
    """Copy a piece to its place among the first rows."""
    dtype: torch.dtype = getattr(torch, row.dtype)
    if row.name not in whole:
        whole[row.name] = torch.empty(row.place.shape, dtype=dtype, device="cpu")
    where = tuple(
        slice(start, start + size)
        for start, size in zip(row.place.offsets, row.place.sizes, strict=True)
    )
    whole[row.name][where] = piece.clone().view(dtype).view(row.place.sizes)


def _write_one(
    file: Path, row: Row, tensor: torch.Tensor
) -> tuple[tuple[str, Record], tuple[str, Stored]]:
    shape = row.place.shape
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    head = header(row.dtype, shape, len(raw))
    files.write_file(file, [head, raw], sync=False)
    chunk = Chunk(file.name, len(head), len(raw), (0,) * len(shape), shape, zlib.crc32(raw))
    total = len(head) + len(raw)
    return (row.name, Record(chunk, 0, total)), (file.name, Stored(total, zlib.crc32(head)))


def header(dtype: str, shape: tuple[int, ...], length: int) -> bytes:
    """The beginning of a safetensors file with one tensor."""
    word, parts = SPLIT.get(dtype, (WORDS.get(dtype), 0))
    sizes = [*shape, parts] if parts else list(shape)
    entry = {"dtype": word, "shape": sizes, "data_offsets": [0, length]}
    text = json.dumps({"__metadata__": {"dtype": dtype}, KEY: entry}).encode()
    # With the eight bytes of its length before it, the values begin on a multiple of 64.
    text += b" " * (-len(text) % 64 + 56)
    return len(text).to_bytes(8, "little") + text


def file_stems(names: Iterable[str]) -> dict[str, str]:
    """A file name for each parameter name: itself where safe and short, else with a hash.

    >>> file_stems(["wte.weight", "a/b"])
    {'wte.weight': 'wte.weight', 'a/b': 'a_b-c14cddc033f6'}
    """
    stems: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        stem = re.sub(r"[\x00-\x1f\x7f/\\:*?\"<>|]", "_", name)
        safe = stem == name and bool(stem.strip(". "))
        # Some file systems do not tell capitals apart.
        if not safe or len(stem.encode()) > LONGEST or stem.casefold() in taken:
            stem = f"{_shorten(stem)}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        stems[name] = stem
        taken.add(stem.casefold())
    return stems


def _shorten(stem: str) -> str:
    """The beginning of a name that fits, cut between characters."""
    return stem.encode()[: LONGEST - 13].decode(errors="ignore")
