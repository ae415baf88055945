"""Full dumps: every rank writes its pieces into one file of torch's checkpoint format (DCP)."""

import pickle
import queue
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from gradsight.core import files
from gradsight.core.guard import Guard
from gradsight.dump.gradients import Row
from gradsight.dump.manifest import Chunk, Entry, Stored
from gradsight.dump.staging import Buffer, Span
from gradsight.dump.torch_record import describe, frame

METADATA = ".metadata"
DCP_VERSION = "1.0.0"


@dataclass(frozen=True, slots=True)
class Record:
    """A written piece and the whole record around it, as torch's reader wants to know it."""

    chunk: Chunk
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank wrote: a record for each of its pieces, by name."""

    records: tuple[tuple[str, Record], ...] = ()
    files: tuple[tuple[str, Stored], ...] = ()


def checked(buffer: Buffer, span: Span) -> Row:
    """A staged piece's row; one that other ranks may offer too gets a checksum, to be compared."""
    if span.row.alone:
        return span.row
    return replace(span.row, crc32=zlib.crc32(buffer.raw(span)))


def write_shard(folder: Path, rank: int, buffer: Buffer, spans: Sequence[Span]) -> Shard:
    """Write this rank's pieces; checksums are computed beside the writing."""
    if not spans:
        return Shard()
    name = f"__{rank}_0.distcp"
    # Not torch's own writer: with several threads it reports success where a write has failed.
    sums = Checksums([buffer.raw(span) for span in spans])
    try:
        body = _Body(name, buffer, spans, sums)
        files.write_file(folder / name, body.parts())
    finally:
        sums.close()
    return Shard(tuple(body.records), ((name, Stored(body.position, body.frame_crc)),))


_LOOK = 1.0
"""Seconds after which it is looked whether a checksum can still come."""


class Checksums:
    """The crc32 of each part, in order, computed in a thread beside the writing."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._sums: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopped = False
        # zlib lets go of the interpreter's lock for large parts, so that both go on at once.
        guard = Guard(None, "crc", "checksums could not be computed")
        run = partial(guard.attempt, self._run)
        self._thread = threading.Thread(target=run, name="gradsight-crc", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # The interpreter is ending (a dump that nobody closed) and starts no more threads.
            self._run()

    def next(self) -> int:
        """The checksum of the next part."""
        while True:
            try:
                return self._sums.get(timeout=_LOOK)
            except queue.Empty:
                if not self._thread.is_alive() and self._sums.empty():
                    raise RuntimeError("the thread that computes checksums has ended") from None

    def close(self) -> None:
        """Stop, and return when no part is read any more."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        for part in self._parts:
            if self._stopped:
                return
            self._sums.put(zlib.crc32(part))


class _Body:
    """The bytes of a shard's file in their order, and a note of where each piece came to lie."""

    def __init__(self, name: str, buffer: Buffer, spans: Sequence[Span], sums: Checksums) -> None:
        self.position = 0
        self.frame_crc = 0
        self.records: list[tuple[str, Record]] = []
        self._name = name
        self._buffer = buffer
        self._spans = spans
        self._sums = sums

    def parts(self) -> Iterator[bytes | memoryview]:
        """Head, raw bytes and tail of one record after the other."""
        for span in self._spans:
            place = span.row.place
            length = span.stop - span.start
            crc = self._sums.next()
            described = describe(place.sizes, getattr(torch, span.row.dtype))
            around = frame(self.position, described, length, crc)
            yield around.head
            yield self._buffer.raw(span)
            yield around.tail
            chunk = Chunk(
                self._name,
                self.position + len(around.head),
                length,
                place.offsets,
                place.sizes,
                crc,
            )
            total = len(around.head) + length + len(around.tail)
            self.records.append((span.row.name, Record(chunk, self.position, total)))
            self.frame_crc = zlib.crc32(around.tail, zlib.crc32(around.head, self.frame_crc))
            self.position += total


def write_metadata(folder: Path, tensors: Mapping[str, Entry], shards: Sequence[Shard]) -> Stored:
    """Write the index that torch's own reader opens; ours never does."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described = {}
    for name, entry in tensors.items():
        boxes = [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in entry.chunks
        ]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        described[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), boxes)
    storage = {
        MetadataIndex(name, record.chunk.offsets): _StorageInfo(
            record.chunk.file, record.start, record.length
        )
        for shard in shards
        for name, record in shard.records
    }
    paths = {name: (name,) for name in tensors}
    metadata = Metadata(
        dict(described),
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=DCP_VERSION,
    )
    # torch's reader knows no other form. torch's writer syncs this file before the buffer is
    # flushed, so that a crash may leave it cut off.
    data = pickle.dumps(metadata)
    files.write_file(folder / METADATA, [data])
    return Stored(len(data), zlib.crc32(data))
