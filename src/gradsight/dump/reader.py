"""Reading dumps in plain Python: no process group, no pickle, checksums compared."""

import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from gradsight.core import limits
from gradsight.core.places import kind_below, open_file, refuse_links
from gradsight.core.rundir import directory_path
from gradsight.dump.folders import FOLDERS, Layout
from gradsight.dump.manifest import ITEM_BYTES, NAME, Chunk, Entry, Manifest, read
from gradsight.errors import RunError, UsageError
from gradsight.values.dumps import DumpMetadata
from gradsight.values.plain import nearest

if TYPE_CHECKING:
    import torch

Slices = tuple[slice, ...]
Bytes = npt.NDArray[np.uint8]
BLOCK = 1 << 24
"""Bytes that are read and checked at a time."""
_MOST_OPEN = 64
"""Files that are open at a time; systems allow some hundreds."""


def get_checkpoint_metadata(directory: str | Path) -> DumpMetadata:
    """What a dump holds, from its manifest alone.

    directory: the dump's folder.
    """
    return _metadata(read(dump_folder(directory)))


def dumps_in(run_dir: Path) -> list[DumpMetadata]:
    """The complete dumps of a run, in the order of steps; what cannot be read is left out.

    So is what comes after more text of manifests than one look takes.
    """
    found: list[DumpMetadata] = []
    for layout in (Layout(run_dir, kind) for kind in FOLDERS):
        found += map(_metadata, layout.each(limits.MANIFESTS_BYTES))
    return sorted(found, key=lambda dump: (dump.step, dump.kind))


def _metadata(manifest: Manifest) -> DumpMetadata:
    return DumpMetadata(
        step=manifest.step,
        kind=manifest.kind,
        world_size=manifest.world_size,
        gradient=manifest.gradient,
        tensors={name: (entry.shape, entry.dtype) for name, entry in manifest.tensors.items()},
        parameters=manifest.parameters,
        bytes=manifest.bytes,
        created=manifest.created,
        reason=manifest.reason,
        clip_coef=manifest.clip_coef,
        scale=manifest.scale,
        left_out=manifest.left_out,
    )


def load_keys(
    directory: str | Path, keys: Iterable[str], *, index: slice | Slices | None = None
) -> "Iterator[torch.Tensor]":
    """The gradients of these parameters, in the order of the keys.

    Checksums are compared while reading.

    directory: the dump's folder.
    keys: names of parameters, or one name.
    index: one slice per leading dimension: gives only that part of each tensor. The chunks that
      it lies in are read whole, for their checksums.
    """
    folder = dump_folder(directory)
    manifest = read(folder)
    wanted = _names(keys)
    # All names are looked up before the first tensor is read: a wrong one is an error at once.
    names = [lookup(manifest, folder, key) for key in wanted]
    return (_tensor(folder, name, manifest, index) for name in names)


def dump_folder(directory: str | Path) -> Path:
    """The folder itself, or of a step's folder the only dump in it."""
    folder = directory_path(directory, "directory")
    if folder.is_file():
        raise RunError(f"{folder} is a file; expected the folder of a dump")
    if not folder.is_dir() or kind_below(folder, NAME) is not None:
        return folder
    names = [name for name in FOLDERS.values() if kind_below(folder, name) is not None]
    inside = [refuse_links(folder, name) for name in names]
    if not inside:
        return folder
    if len(inside) > 1:
        raise UsageError(f"{folder} holds two dumps; name one of them: {inside[0]} or {inside[1]}")
    return inside[0]


def _names(keys: object) -> list[str]:
    """The names that a user asks for: one, or several."""
    if isinstance(keys, str):
        return [keys]
    asked: list[object] = [keys]
    if isinstance(keys, Iterable):
        asked = list(keys)
    names = [key for key in asked if isinstance(key, str)]
    if len(names) < len(asked):
        wrong = next(key for key in asked if not isinstance(key, str))
        shown = f"{type(wrong).__name__} {wrong!r}"[:60]
        raise UsageError(f"keys must be names of parameters, such as ['weight'], got {shown}")
    return names


def lookup(manifest: Manifest, folder: Path, key: str) -> str:
    """The name under which a parameter's gradient stands; tied parameters have several."""
    name = manifest.aliases.get(key, key)
    if name in manifest.tensors:
        return name
    if name in manifest.left_out:
        raise UsageError(f"the gradient of {key!r} is not in {folder}: {manifest.left_out[name]}")
    if name in manifest.parameters:
        raise UsageError(f"{key!r} had no gradient at step {manifest.step}, so {folder} has none")
    known = nearest(key, [*manifest.tensors, *manifest.aliases])
    raise UsageError(f"{folder} has no gradient named {key!r}; {known}")


def bounds(shape: tuple[int, ...], index: slice | Slices | None) -> list[tuple[int, int]]:
    """First and last-plus-one entry along each dimension that an index asks for."""
    slices: Slices = ()
    if index is not None:
        slices = index if isinstance(index, tuple) else (index,)
    if len(slices) > len(shape) or not all(_is_span(part) for part in slices):
        raise UsageError(
            f"index must be at most {len(shape)} slices of whole numbers without a step, "
            f"got {index!r}"
        )
    spans = [part.indices(length)[:2] for part, length in zip(slices, shape, strict=False)]
    return [(start, max(start, stop)) for start, stop in spans] + [
        (0, length) for length in shape[len(slices) :]
    ]


def _is_span(part: object) -> bool:
    if not isinstance(part, slice) or part.step not in (None, 1):
        return False
    return all(end is None or isinstance(end, SupportsIndex) for end in (part.start, part.stop))


def gather(
    folder: Path, name: str, entry: Entry, index: slice | Slices | None = None, check: bool = True
) -> Bytes:
    """The raw bytes of a tensor or a part of it, row-major; the last axis is those of one entry.

    With `check`, whole chunks are read and compared with their checksums, however little of them
    is wanted; without, only what is wanted.
    """
    width = ITEM_BYTES[entry.dtype]
    spans = bounds(entry.shape, index)
    wanted = [chunk for chunk in entry.chunks if chunk.bytes and _reaches(chunk, spans)]
    # Before there is memory for it: a manifest can claim what no file holds.
    last_in_file = {chunk.file: chunk for chunk in sorted(wanted, key=lambda each: each.offset)}
    for chunk in last_in_file.values():
        with opened_chunk(folder, name, chunk):
            pass
    out = _empty([stop - start for start, stop in spans] + [width], name)
    for chunk in wanted:
        inner = []
        outer = []
        for (start, stop), begin, size in zip(spans, chunk.offsets, chunk.sizes, strict=True):
            low = max(start, begin)
            high = min(stop, begin + size)
            inner.append((low - begin, high - begin))
            outer.append(slice(low - start, high - start))
        out[tuple(outer)] = _read_box(folder, name, chunk, inner, check)
    return out


def _reaches(chunk: Chunk, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether something of a chunk lies between these ends."""
    return all(
        max(start, begin) < min(stop, begin + size)
        for (start, stop), begin, size in zip(spans, chunk.offsets, chunk.sizes, strict=True)
    )


def _empty(shape: Sequence[int], name: str) -> Bytes:
    try:
        return np.empty(shape, dtype=np.uint8)
    except (MemoryError, ValueError):
        size = math.prod(shape)
        raise RunError(f"the gradient of {name!r} takes {size:,} bytes: no memory for it") from None


def _read_box(
    folder: Path, name: str, chunk: Chunk, box: Sequence[tuple[int, int]], check: bool
) -> Bytes:
    """A box of a chunk; unless the whole is to be compared, a box in one stretch is read alone."""
    sizes = [high - low for low, high in box]
    width = chunk.bytes // math.prod(chunk.sizes)
    first = _position([low for low, _ in box], chunk.sizes)
    stretch = _position([high - 1 for _, high in box], chunk.sizes) + 1 - first
    alone = not check and stretch == math.prod(sizes)
    offset = chunk.offset
    count = chunk.bytes
    if alone:
        offset += first * width
        count = stretch * width
    stored = _empty([count], name)
    with opened_chunk(folder, name, chunk) as handle:
        read_into(handle, folder / chunk.file, name, offset, stored)
    if alone:
        return stored.reshape(*sizes, width)
    if check and zlib.crc32(stored.data) != chunk.crc32:
        raise wrong_checksum(folder / chunk.file, name)
    return stored.reshape(*chunk.sizes, width)[tuple(slice(low, high) for low, high in box)]


def _position(corner: Sequence[int], sizes: Sequence[int]) -> int:
    """The place of an entry in a row-major array."""
    place = 0
    for index, size in zip(corner, sizes, strict=True):
        place = place * size + index
    return place


@contextmanager
def opened_chunk(folder: Path, name: str, chunk: Chunk) -> Iterator[int]:
    """A descriptor of a chunk's file, which is large enough to hold it."""
    path = folder / chunk.file
    try:
        handle = open_file(folder, chunk.file)
    except FileNotFoundError:
        raise RunError(
            f"{path} is missing; without it the gradient of {name!r} cannot be read"
        ) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if os.fstat(handle).st_size < chunk.offset + chunk.bytes:
            raise cut_short(path, name)
        yield handle
    finally:
        os.close(handle)


def stored_blocks(folder: Path, name: str, entry: Entry) -> Iterator[Bytes]:
    """All bytes of a gradient, chunk after chunk, and compared with their checksums.

    They come in blocks, in one array that is filled again and again: thousands of small chunks do
    not take thousands of calls, and a large one takes no more memory than a small one.
    """
    block = np.empty(min(BLOCK, entry.bytes), np.uint8)
    filled = 0
    with _OpenFiles(folder, name) as opened:
        for chunk in entry.chunks:
            handle = opened.handle(chunk)
            crc = 0
            done = 0
            while done < chunk.bytes:
                part = block[filled : filled + chunk.bytes - done]
                read_into(handle, folder / chunk.file, name, chunk.offset + done, part)
                crc = zlib.crc32(part.data, crc)
                done += len(part)
                filled += len(part)
                if filled == len(block):
                    yield block
                    filled = 0
            if crc != chunk.crc32:
                raise wrong_checksum(folder / chunk.file, name)
    if filled:
        yield block[:filled]


class _OpenFiles:
    """The files that a gradient's chunks lie in, each opened once as long as they are few."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._stack = ExitStack()
        self._handles: dict[str, int] = {}

    def __enter__(self) -> "_OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def handle(self, chunk: Chunk) -> int:
        """A descriptor of a chunk's file."""
        known = self._handles.get(chunk.file)
        if known is None:
            if len(self._handles) >= _MOST_OPEN:
                self._stack.close()
                self._handles.clear()
            known = self._stack.enter_context(opened_chunk(self._folder, self._name, chunk))
            self._handles[chunk.file] = known
        return known


def read_into(handle: int, path: Path, name: str, offset: int, out: Bytes) -> None:
    """Fill an array from a place in a file. Not mapped: a file cut off meanwhile would kill us."""
    done = 0
    while done < len(out):
        count = os.preadv(handle, [out[done : done + BLOCK].data], offset + done)
        if not count:
            raise cut_short(path, name)
        done += count


def cut_short(path: Path, name: str) -> RunError:
    """The error for a file that ends too early."""
    return RunError(f"{path} is cut short; without its end the gradient of {name!r} cannot be read")


def wrong_checksum(path: Path, name: str) -> RunError:
    """The error for bytes that are not those that were written."""
    return RunError(f"{path} is damaged: the checksum of the gradient of {name!r} does not match")


def _tensor(
    folder: Path, name: str, manifest: Manifest, index: slice | Slices | None
) -> "torch.Tensor":
    import torch

    entry = manifest.tensors[name]
    raw = gather(folder, name, entry, index)
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return torch.from_numpy(raw.reshape(-1)).view(dtype).view(raw.shape[:-1])
