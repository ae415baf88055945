"""Norms as heights: their logarithms to base two, with a number for what has none. No torch.

Everything the picture does to norms (largest, smallest, what a block's own norm is) is done on
heights: half the bytes of the record's widest norms, no overflow, and colours need them anyway.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsight.store.stat_chunks import NO_GRADIENT, StatChunk
from gradsight.values.steps import block_of

Heights = npt.NDArray[Any]
"""Of float32."""

ZERO = -2000.0
"""The height of a norm of zero: below that of every number that a float64 holds."""
ABSENT = -np.inf
"""The height where there is no gradient. An infinite norm is at plus infinity, NaN is NaN."""


def heights_of(norms: npt.NDArray[np.floating]) -> Heights:
    """Norms as heights.

    >>> heights_of(np.array([8.0, 0.0, -1.0, np.inf, np.nan])).tolist()
    [3.0, -2000.0, -inf, inf, nan]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        heights: Heights = np.log2(norms).astype(np.float32)
    heights[norms == 0] = ZERO
    heights[norms == NO_GRADIENT] = ABSENT
    return heights


class HeatRows:
    """The rows of the picture: every parameter, and every block of several as a row of its own."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._place = {name: row for row, name in enumerate(self.names)}
        members: dict[str, list[int]] = {}
        for row, name in enumerate(self.names):
            members.setdefault(block_of(name), []).append(row)
        self.blocks: Mapping[str, list[int]] = {
            block: rows for block, rows in members.items() if len(rows) > 1
        }
        """Their members, by name; a parameter that is alone in its block is no block."""

    def __len__(self) -> int:
        return len(self.names) + len(self.blocks)

    def heights(self, chunk: StatChunk) -> Heights:
        """The heights of a chunk's norms, [steps, rows]; blocks come after the parameters."""
        result = self.spread_out(chunk, heights_of(chunk.l2))
        for row, members in enumerate(self.blocks.values(), len(self.names)):
            result[:, row] = block_heights(result[:, members])
        return result

    def spread_out(self, chunk: StatChunk, heights: Heights) -> Heights:
        """Heights of a chunk's parameters in the rows of the picture; blocks have none yet."""
        # A run that is being written may have got parameters since the rows were made.
        known = [place for place, name in enumerate(chunk.names) if name in self._place]
        rows = [self._place[chunk.names[place]] for place in known]
        result = np.full((len(heights), len(self)), ABSENT, dtype=np.float32)
        result[:, rows] = heights[:, known]
        return result


def block_heights(members: Heights) -> Heights:
    """The height of the norm of several gradients together, by step; members are [steps, n].

    >>> members = heights_of(np.array([[6.0, 8.0], [0.0, 0.0], [-1.0, -1.0]]))
    >>> np.exp2(block_heights(members)).round(3).tolist()
    [10.0, 0.0, 0.0]
    """
    highest = members.max(axis=1)
    # Relative to the highest one, so that no square is too large or too small for its number.
    is_number = np.isfinite(highest) & (highest > ZERO)
    unit = np.where(is_number, highest, 0).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.exp2(2 * (members - unit[:, None])).sum(axis=1)
        heights = unit + 0.5 * np.log2(np.maximum(squares, 1.0))
    result: Heights = np.where(is_number, heights, highest)
    return result
