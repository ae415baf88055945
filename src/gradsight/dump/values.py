"""The values of dumped gradients as numpy arrays, for looking at them without torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.dump.manifest import ITEM_BYTES, Entry
from gradsight.dump.reader import Slices, gather, stored_blocks

Values = npt.NDArray[Any]

PLAIN = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "complex128": "<c16",
    "complex64": "<c8",
}
FLOAT8 = {
    "float8_e4m3fn": (4, 7, True),
    "float8_e4m3fnuz": (4, 8, False),
    "float8_e5m2": (5, 15, True),
    "float8_e5m2fnuz": (5, 16, False),
}
"""Exponent bits, bias, and whether it is of the OCP standard (else negative zero is NaN)."""


def values(
    folder: Path, name: str, entry: Entry, index: slice | Slices | None = None, check: bool = True
) -> Values:
    """A dumped gradient in the narrowest numpy dtype that holds it exactly."""
    return widen(gather(folder, name, entry, index, check), entry.dtype)


@dataclass(frozen=True, slots=True)
class StoredValues:
    """The values of a gradient in blocks, as often as they are asked for; each is used at once."""

    folder: Path
    name: str
    entry: Entry

    def __iter__(self) -> Iterator[Values]:
        width = ITEM_BYTES[self.entry.dtype]
        for block in stored_blocks(self.folder, self.name, self.entry):
            yield widen(block.reshape(-1, width), self.entry.dtype)


def slabs(shape: tuple[int, ...], most: int) -> Iterator[Slices]:
    """Boxes of at most so many entries that together are a shape, in the order of its entries.

    >>> [[(part.start, part.stop) for part in slab] for slab in slabs((2, 3), 2)]
    [[(0, 1), (0, 2)], [(0, 1), (2, 3)], [(1, 2), (0, 2)], [(1, 2), (2, 3)]]
    """
    if math.prod(shape) <= most:
        yield tuple(slice(0, length) for length in shape)
        return
    rest = math.prod(shape[1:])
    rows = max(1, most // max(1, rest))
    for start in range(0, shape[0], rows):
        rows_here = slice(start, min(shape[0], start + rows))
        for inner in slabs(shape[1:], max(1, most // rows)):
            yield (rows_here, *inner)


def widen(raw: npt.NDArray[np.uint8], dtype: str) -> Values:
    """Raw bytes (last axis: the bytes of one entry) as numbers."""
    shape = raw.shape[:-1]
    flat = raw.reshape(-1)
    if dtype in PLAIN:
        return flat.view(PLAIN[dtype]).reshape(shape)
    if dtype == "bfloat16":
        # The upper half of a float32.
        return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype == "complex32":
        # numpy has no complex of halves, and warns of signalling NaN on the way to float32.
        with np.errstate(invalid="ignore"):
            return flat.view("<f2").astype(np.float32).view(np.complex64).reshape(shape)
    return _table(*FLOAT8[dtype])[flat].reshape(shape)


def _table(exponent_bits: int, bias: int, standard: bool) -> npt.NDArray[np.float32]:
    """The number that each of the 256 bytes stands for."""
    codes = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    numbers = np.where(
        exponent > 0, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias)
    )
    if not standard:
        numbers[0x80] = np.nan
    elif exponent_bits == 4:
        # e4m3fn has no infinity: its largest codes are numbers, and only the last one is NaN.
        numbers[0x7F] = numbers[0xFF] = np.nan
    else:
        numbers[exponent == 31] = np.nan
        numbers[[0x7C, 0xFC]] = np.inf
    return np.where(codes >= 128, -numbers, numbers).astype(np.float32)
