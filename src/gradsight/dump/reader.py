"""Reading dumps in plain Python: no process group, no pickle, checksums compared."""

import difflib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from gradsight.core.rundir import directory_path
from gradsight.dump.folders import FOLDERS, Layout
from gradsight.dump.manifest import ITEM_BYTES, NAME, Chunk, Entry, Manifest, read
from gradsight.errors import RunError, UsageError
from gradsight.values.dumps import DumpMetadata

if TYPE_CHECKING:
    import torch

Slices = tuple[slice, ...]
Bytes = npt.NDArray[np.uint8]


def get_checkpoint_metadata(directory: str | Path) -> DumpMetadata:
    """What a dump holds, from its manifest alone.

    directory: the dump's folder.
    """
    return _metadata(read(dump_folder(directory)))


def dumps_in(run_dir: Path) -> list[DumpMetadata]:
    """All complete dumps of a run, in the order of steps; what cannot be read is left out."""
    found = []
    for layout in (Layout(run_dir, kind) for kind in FOLDERS):
        found += [_metadata(manifest) for manifest in layout.complete()]
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
    index: one slice per leading dimension: reads only that part of each tensor, straight from its
      place on the disk. Whole chunks are then not read, so their checksums are not compared.
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
    inside = [folder / name for name in FOLDERS.values() if (folder / name / NAME).exists()]
    if (folder / NAME).exists() or not inside:
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
    near = difflib.get_close_matches(key, [*manifest.tensors, *manifest.aliases], n=3, cutoff=0.4)
    names = f"it has {', '.join(list(manifest.tensors)[:5])}, ..."
    if near:
        names = f"nearest: {', '.join(near)}"
    raise UsageError(f"{folder} has no gradient named {key!r}; {names}")


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


def gather(folder: Path, name: str, entry: Entry, index: slice | Slices | None = None) -> Bytes:
    """The raw bytes of a tensor or a part of it, row-major; the last axis is those of one entry."""
    width = ITEM_BYTES[entry.dtype]
    spans = bounds(entry.shape, index)
    out = np.empty([stop - start for start, stop in spans] + [width], dtype=np.uint8)
    for chunk in entry.chunks:
        inner = []
        outer = []
        for (start, stop), begin, size in zip(spans, chunk.offsets, chunk.sizes, strict=True):
            low = max(start, begin)
            high = min(stop, begin + size)
            inner.append(slice(low - begin, high - begin))
            outer.append(slice(low - start, high - start))
        if chunk.bytes and all(part.stop > part.start for part in outer):
            stored = open_chunk(folder, name, chunk, check=index is None)
            out[tuple(outer)] = stored.reshape(*chunk.sizes, width)[tuple(inner)]
    return out


def open_chunk(folder: Path, name: str, chunk: Chunk, check: bool = True) -> Bytes:
    """The bytes of a chunk, mapped from the disk; compared with their checksum if asked."""
    path = folder / chunk.file
    try:
        stored: Bytes = np.memmap(path, np.uint8, "r", chunk.offset, (chunk.bytes,))
    except FileNotFoundError:
        raise RunError(
            f"{path} is missing; without it the gradient of {name!r} cannot be read"
        ) from None
    except (OSError, ValueError):
        raise RunError(
            f"{path} is cut short; without its end the gradient of {name!r} cannot be read"
        ) from None
    if check and zlib.crc32(stored.data) != chunk.crc32:
        raise RunError(
            f"{path} is damaged: the checksum of the gradient of {name!r} does not match"
        )
    return stored


def _tensor(
    folder: Path, name: str, manifest: Manifest, index: slice | Slices | None
) -> "torch.Tensor":
    import torch

    entry = manifest.tensors[name]
    raw = gather(folder, name, entry, index)
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return torch.from_numpy(raw.reshape(-1)).view(dtype).view(raw.shape[:-1])
