"""Arrays as text that a browser unpacks: one byte per cell, deltas, deflate, base64. No torch.

A height becomes a code of one byte. A row's codes count quarters of an octave from the row's lowest
height, so that a byte spans 62 octaves; a row that spans more has wider steps, and then always a
second byte. One byte is at most 9% off. The second byte says where within the step the height lies,
to a 64th part of it: 0.14% at most.
"""

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.show.page.heights import ABSENT, ZERO, Heights
from gradsight.show.page.pyramid import Columns

Bytes = npt.NDArray[np.uint8]

CODE_ZERO = 0
CODE_TOP = 250
CODE_ABSENT = 253
CODE_INFINITE = 254
CODE_NAN = 255
QUARTER = 0.25
PARTS = 64
WIDE_PARTS = 250
"""Into how many parts the second byte divides a step; the whole byte would cost a fifth more."""
UNKNOWN = -128
"""The deviation where nothing is known."""
NEAR = 16.0
NEAR_CODES = 32
FAR_CODES = 12.0
"""Codes of a deviation: 32 for the first 16 spreads, then 12 for every doubling."""


@dataclass(frozen=True)
class RowScales:
    """How the codes of each row are read: height = base + (code - 1 + part) * unit."""

    base: npt.NDArray[np.float64]
    unit: npt.NDArray[np.float64]

    @property
    def wide(self) -> npt.NDArray[np.bool_]:
        """Rows whose steps are wider than a quarter octave: one byte is not enough for them."""
        return self.unit > QUARTER

    @property
    def parts(self) -> npt.NDArray[np.intp]:
        """Into how many parts each row's steps are divided."""
        return np.where(self.wide, WIDE_PARTS, PARTS)


def row_scales(low: Heights, high: Heights) -> RowScales:
    """The scales for rows of these heights, [columns, rows]."""
    both = np.concatenate([low, high])
    is_number = np.isfinite(both) & (both > ZERO)
    least = np.where(is_number, both, np.inf).min(axis=0, initial=np.inf)
    most = np.where(is_number, both, -np.inf).max(axis=0, initial=-np.inf)
    base = np.where(np.isfinite(least), least, 0.0).astype(np.float64)
    span = np.where(np.isfinite(most), most, 0.0) - base
    # A hair more than the span, so that the highest is inside its step and not at its end.
    unit = np.maximum(QUARTER, span * (1 + 1e-6) / CODE_TOP)
    return RowScales(base, unit)


def codes_of(heights: Heights, scales: RowScales) -> tuple[Bytes, Bytes]:
    """The code of each height and its place within the step, [columns, rows]."""
    with np.errstate(invalid="ignore"):
        place = (heights - scales.base) / scales.unit
        place = np.clip(np.nan_to_num(place, posinf=0, neginf=0), 0, CODE_TOP - 1e-4)
    codes = np.floor(place)
    parts = np.minimum((place - codes) * scales.parts, scales.parts - 1).astype(np.uint8)
    codes += 1
    codes[heights == ZERO] = CODE_ZERO
    codes[heights == ABSENT] = CODE_ABSENT
    codes[np.isposinf(heights)] = CODE_INFINITE
    codes[np.isnan(heights)] = CODE_NAN
    parts[(codes == CODE_ZERO) | (codes > CODE_TOP)] = 0
    return codes.astype(np.uint8), parts


def deviation_codes(deviations: Heights) -> npt.NDArray[np.int8]:
    """Halves of a spread up to 16 spreads, and beyond that ever coarser, as signed bytes.

    >>> deviation_codes(np.array([0.0, 1.0, -16.0, 400.0, np.nan], np.float32)).tolist()
    [0, 2, -32, 88, -128]
    """
    size = np.abs(deviations)
    far = NEAR_CODES + FAR_CODES * np.log2(np.maximum(size, NEAR) / NEAR)
    codes = np.where(size <= NEAR, size * NEAR_CODES / NEAR, far)
    codes = np.sign(deviations) * np.round(np.minimum(codes, 127))
    return np.where(np.isnan(deviations), UNKNOWN, codes).astype(np.int8)


def packed(values: npt.NDArray[Any]) -> str:
    """Bytes as text: deflate, base64."""
    # What is packed here is noise with runs in it: looking for more than runs takes thirty times as
    # long, and the text gets a tenth longer.
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return base64.b64encode(packer.compress(values.tobytes()) + packer.flush()).decode()


def packed_rows(plane: npt.NDArray[Any]) -> str:
    """A plane of bytes [columns, rows], row by row."""
    return packed(np.ascontiguousarray(plane.T))


def packed_deltas(plane: Bytes) -> str:
    """The same, each byte as the difference to the one before it in its row.

    Norms change little from step to step, so that differences are small and pack well.
    """
    rows = np.ascontiguousarray(plane.T)
    return packed(np.diff(rows, axis=1, prepend=np.uint8(0)).astype(np.uint8))


def packed_numbers(values: npt.ArrayLike) -> str:
    """Whole numbers that ascend, as differences of 32 bits."""
    numbers = np.asarray(values, dtype=np.int64)
    return packed(np.diff(numbers, prepend=0).astype("<u4"))


def packed_floats(values: npt.ArrayLike) -> str:
    """Numbers of 32 bits; their bytes lie apart by significance, which packs better."""
    floats = np.asarray(values, dtype="<f4")
    return packed(np.ascontiguousarray(floats.view(np.uint8).reshape(-1, 4).T))


def encoded_level(columns: Columns, fine: bool | npt.NDArray[np.bool_]) -> dict[str, Any]:
    """A level of the picture as the page takes it; `fine`: which rows get a second byte, or all."""
    scales = row_scales(columns.low, columns.high)
    high, high_parts = codes_of(columns.high, scales)
    low, low_parts = codes_of(columns.low, scales)
    level: dict[str, Any] = {
        "columns": len(columns),
        "starts": packed_numbers(columns.starts),
        "lasts": packed_numbers(columns.lasts),
        "base": packed_floats(scales.base),
        "unit": packed_floats(scales.unit),
        "high": packed_deltas(high),
        "deviation": packed_rows(deviation_codes(columns.deviation)),
        "whole": columns.is_whole,
    }
    if not columns.is_whole:
        # The depth of a column hardly changes along a row: it packs better than the lowest itself.
        level["depth"] = packed_rows(high - low)
    rows = np.flatnonzero(scales.wide | fine)
    if len(rows):
        level["fine"] = packed_numbers(rows)
        level["high_parts"] = packed_rows(high_parts[:, rows])
        if not columns.is_whole:
            level["low_parts"] = packed_rows(low_parts[:, rows])
    return level


def encoded_size(level: dict[str, Any]) -> int:
    """How many characters a level takes."""
    return sum(len(value) for value in level.values() if isinstance(value, str))
