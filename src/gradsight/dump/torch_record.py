"""The bytes around a gradient that make it a record of torch's distributed checkpoint format.

Such a record is what `torch.save` writes: an uncompressed zip archive with a small pickle that
describes the tensor and one entry with its raw bytes. Written here by hand, so that the raw bytes
go from the staging buffer to the disk without a copy, lie on a multiple of 64, and share one
checksum with the manifest.
"""

import io
import math
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

ALIGN = 64
LIMIT = 0xFFFFFFFF
"""From this size on a zip entry needs the 64-bit form."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What comes before and after the raw bytes of one tensor."""

    head: bytes
    tail: bytes


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Stands for the raw bytes of a tensor: what torch calls them, and how many entries."""

    kind: Any
    count: int


class _Tensor:
    """Stands for a dense tensor of any size; pickled as torch pickles one, without its memory."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        count = math.prod(sizes)
        known = torch.storage._dtype_to_storage_type_map()
        strides = tuple(
            math.prod(max(1, size) for size in sizes[axis + 1 :]) for axis in range(len(sizes))
        )
        hooks: OrderedDict[str, object] = OrderedDict()
        common = 0, sizes, strides, False, hooks
        if dtype in known:
            self._rebuilt: Any = (
                torch._utils._rebuild_tensor_v2,
                (_Bytes(getattr(torch, known[dtype]), count), *common),
            )
        else:
            # Newer dtypes (float8) have no storage class of their own; torch.save names them apart.
            raw = _Bytes(torch.UntypedStorage, count * dtype.itemsize)
            self._rebuilt = torch._utils._rebuild_tensor_v3, (raw, *common, dtype)

    def __reduce__(self) -> Any:
        return self._rebuilt


class _Describer(pickle.Pickler):
    """Writes a reference in place of a tensor's bytes, as torch.save does."""

    def persistent_id(self, value: Any) -> Any:
        """How torch.load finds the bytes: entry 0 of the archive."""
        if not isinstance(value, _Bytes):
            return None
        return ("storage", value.kind, "0", "cpu", value.count)


# Remembered: a model's shapes are the same at every dump.
@lru_cache(maxsize=1 << 14)
def describe(sizes: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """The pickle of a dense tensor, without its bytes."""
    target = io.BytesIO()
    _Describer(target, protocol=2).dump(_Tensor(sizes, dtype))
    return target.getvalue()


def frame(position: int, description: bytes, length: int, crc: int, limit: int = LIMIT) -> Frame:
    """The frame of `length` raw bytes with checksum `crc`; its record starts at `position`."""
    small = {"r/data.pkl": description, "r/byteorder": sys.byteorder.encode(), "r/version": b"3\n"}
    head = b""
    directory = b""
    for name, content in small.items():
        directory += _entry(name, len(content), zlib.crc32(content), limit, header_at=len(head))
        head += _entry(name, len(content), zlib.crc32(content), limit) + content
    directory += _entry("r/data/0", length, crc, limit, header_at=len(head))
    # The raw bytes begin on a multiple of ALIGN of the whole file, so that they can be mapped and
    # viewed as any dtype; 4 is the head of the extra field that holds the padding.
    bare = len(_entry("r/data/0", length, crc, limit))
    padding = -(position + len(head) + bare + 4) % ALIGN
    head += _entry("r/data/0", length, crc, limit, padding=padding)
    return Frame(head, directory + _end(len(small) + 1, len(directory), len(head) + length, limit))


def _entry(
    name: str,
    length: int,
    crc: int,
    limit: int,
    header_at: int | None = None,
    padding: int | None = None,
) -> bytes:
    """The header of an entry, or with `header_at` its line in the directory."""
    large = length >= limit
    extra = struct.pack("<HHQQ", 1, 16, length, length) if large else b""
    if padding is not None:
        # The extra field "FB" and its filling are those that torch.save pads with.
        extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    shown = 0xFFFFFFFF if large else length
    # 0x21 is the first day that a zip can name: 1980-01-01.
    common = struct.pack("<4H3I2H", 0, 0, 0, 0x21, crc, shown, shown, len(name), len(extra))
    needed = struct.pack("<H", 45 if large else 20)
    if header_at is None:
        return b"PK\x03\x04" + needed + common + name.encode() + extra
    return (
        b"PK\x01\x02"
        + needed * 2
        + common
        + struct.pack("<3H2I", 0, 0, 0, 0, header_at)
        + name.encode()
        + extra
    )


def _end(count: int, directory: int, at: int, limit: int) -> bytes:
    """The end of the archive: where its directory of `count` entries and `directory` bytes lies."""
    wide = b""
    if at >= limit:
        wide = b"PK\x06\x06" + struct.pack(
            "<Q2H2I4Q", 44, 45, 45, 0, 0, count, count, directory, at
        )
        wide += b"PK\x06\x07" + struct.pack("<IQI", 0, at + directory, 1)
    shown = 0xFFFFFFFF if at >= limit else at
    return wide + b"PK\x05\x06" + struct.pack("<4H2IH", 0, 0, count, count, directory, shown, 0)
