"""By how much gradients were scaled down between a look and the optimizer's step, found from two small pieces of them.

The piece with the largest entry tells: scaling by a norm changes it, and so does clipping by value. If its norm, its largest
entry and the norm of a second piece all shrank alike, that is the coefficient; if not, there is no such number.
"""

from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor

from gradsight.measure.arrival import Arrival, stack
from gradsight.measure.layout import flat
from gradsight.measure.norms import PIECE, NormsLook, measure

_ALIKE = 1e-4
_ALIKE_IN_HALF = 2e-2

Place = tuple[int, int]
"""A row of a look, and the number of a piece within it."""


class ClipProbe:
    """Two pieces of the gradients of a look, measured again when the optimizer is about to use them."""

    __slots__ = ("_after", "_alike", "_places")

    def __init__(self, places: Collection[Place], gradient_of: Callable[[int], Tensor | None]) -> None:
        self._after: list[tuple[Place, Arrival]] = []
        self._alike = _ALIKE
        with torch.no_grad():
            for row, number in places:
                gradient = gradient_of(row)
                if gradient is None:
                    continue
                if gradient.dtype in (torch.float16, torch.bfloat16):
                    self._alike = _ALIKE_IN_HALF
                entries = flat(gradient)
                piece = entries[number * PIECE : (number + 1) * PIECE] if gradient.device.type == "cpu" else entries
                if piece.numel():
                    self._after.append(((row, number), Arrival(stack(measure(piece)))))

    def coefficient(self, look: NormsLook, scale: float) -> float | None:
        """What the optimizer used / the gradient, where the look saw `scale` times what it would see now without clipping."""
        ratios = []
        for (row, number), arrival in self._after:
            before, after = _piece(look, row, number), arrival.read()
            with np.errstate(all="ignore"):
                ratios += [np.sqrt(after[0] / before[0]) * scale, _peak(after) / _peak(before) * scale]
        ratios = [float(ratio) for ratio in ratios]
        if not ratios or not np.isfinite(ratios).all() or max(ratios) - min(ratios) > self._alike * max(ratios):
            return None
        return 1.0 if abs(ratios[0] - 1) < 1e-6 else ratios[0]


def places_to_probe(look: NormsLook, rows: Collection[int]) -> list[Place]:
    """The piece with the largest entry, and the first piece that is not zero of another row."""
    best: Place | None = None
    best_peak = 0.0
    other: Place | None = None
    for piece_rows, values in look.pieces:
        peaks = np.maximum(-values[:, 1], values[:, 2])
        for position in np.argsort(-peaks):
            row = piece_rows[position]
            if row in rows and peaks[position] > best_peak:
                best, best_peak = (row, position - piece_rows.index(row)), float(peaks[position])
                break
    for piece_rows, values in look.pieces:
        for position in np.flatnonzero(values[:, 0] > 0):
            row = piece_rows[position]
            if row in rows and (best is None or row != best[0]):
                other = (row, int(position) - piece_rows.index(row))
                break
    return [place for place in (best, other) if place is not None]


def _piece(look: NormsLook, row: int, number: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    for rows, values in look.pieces:
        if row in rows:
            return values[rows.index(row) + number]  # type: ignore[no-any-return]
    return np.zeros(3)


def _peak(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(max(-values[1], values[2]))
