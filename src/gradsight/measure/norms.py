"""L2 norm and largest magnitude of every gradient, in one pass over the memory and one small copy
to the host.

The squares of float32 entries overflow above 1.8e19 and vanish below 1e-19, and a NaN says only
that there is one. So a look that comes back odd is followed by a closer one at the gradients
concerned, while they are still what they were.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradsight.measure.flatten import flat
from gradsight.measure.host_copy import HostCopy
from gradsight.values.measured import Floats, Norms

PIECE = 2**19
"""Entries read at a time on the CPU: the second reading of a piece finds it in the cache."""

_TOO_SMALL_TO_SQUARE = 1e-15
_TOO_LARGE_TO_SQUARE = 1e18
_DOT_IS_PRECISE = (torch.float32, torch.float64)


class NormReading:
    """One look at a list of gradients: started on the device now, read on the host later."""

    __slots__ = ("_arrivals", "_size", "_stacked", "peaks", "pieces")

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._size = len(gradients)
        self.pieces: list[tuple[list[int], Floats]] = []
        """Once read, per device.

        The rows of its pieces, and an array [n, 3] of sum of squares, smallest and largest.
        """
        self.peaks: list[Floats] = []
        """The same pieces' largest magnitudes."""
        devices: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
        with torch.no_grad():
            for row, gradient in enumerate(gradients):
                entries = flat(gradient)
                size = entries.numel()
                if size == 0:
                    continue
                device = entries.device
                scalars, rows = devices.get(device) or devices.setdefault(device, ([], []))
                pieces = (
                    torch.split(entries, PIECE)
                    if size > PIECE and device.type == "cpu"
                    else (entries,)
                )
                for piece in pieces:
                    rows.append(row)
                    scalars += measure(piece)
            # One stacked vector per device and one copy: a read per parameter would wait for the
            # device as often as there are parameters.
            self._stacked = [torch.stack(scalars) for scalars, _ in devices.values()]
            arrivals = map(HostCopy.of, self._stacked)
            rows_by_device = [rows for _, rows in devices.values()]
            self._arrivals = list(zip(arrivals, rows_by_device, strict=True))

    @property
    def arrays(self) -> int:
        """How many arrays of pieces there are: one per device."""
        return len(self._arrivals)

    def rows(self, array: int) -> list[int]:
        """The row of every piece of an array."""
        return self._arrivals[array][1]

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(arrival.ready() for arrival, _ in self._arrivals)

    def extremes(self) -> list[Tensor]:
        """Per device, the smallest and the largest entry of every piece, still on that device."""
        return [stacked.view(-1, 3)[:, 1:] for stacked in self._stacked]

    def read(self) -> Norms:
        """The numbers as far as one pass gives them."""
        self.pieces = [(rows, arrival.read().reshape(-1, 3)) for arrival, rows in self._arrivals]
        self.peaks = [np.maximum(-values[:, 1], values[:, 2]) for _, values in self.pieces]
        if len(self.pieces) == 1 and len(self.pieces[0][0]) == self._size:
            squares, peaks = self.pieces[0][1][:, 0], self.peaks[0]
        else:
            squares, peaks = np.zeros(self._size), np.zeros(self._size)
            for (rows, values), largest in zip(self.pieces, self.peaks, strict=True):
                _merge(values[:, 0], largest, rows, squares, peaks)
        return with_total(np.sqrt(squares), peaks)


def with_total(l2: Floats, peaks: Floats) -> Norms:
    """Norms with their total; what is not finite has counts that nobody knows yet."""
    square = float(l2.dot(l2))
    # The ordinary case: nothing overflowed, so nothing is NaN or infinite.
    if 1e-60 < square < 1e60:
        return Norms(l2, peaks, None, square**0.5)
    counts = None
    if not np.isfinite(peaks).all():
        unknown = np.where(np.isfinite(peaks), 0.0, -1.0)
        counts = (unknown, unknown.copy())
    return Norms(l2, peaks, counts, float(combine(l2)), wide=True)


def measure(entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of squares, smallest and largest of some entries, in float32 or wider."""
    # aminmax and dot together read a gradient as fast as memory allows; torch's foreach norm of
    # infinity takes twelve times as long, and a loop with isnan() thirty times.
    smallest, largest = torch.aminmax(entries)
    if entries.dtype in _DOT_IS_PRECISE and entries.device.type == "cpu":
        return torch.dot(entries, entries), smallest, largest
    wide = torch.float32 if entries.device.type == "mps" else torch.float64
    return (
        torch.linalg.vector_norm(entries, dtype=wide).square(),
        smallest.to(wide),
        largest.to(wide),
    )


def _merge(
    values: Floats, largest: Floats, rows: list[int], squares: Floats, peaks: Floats
) -> None:
    """Combine pieces into rows.

    Squares add up, magnitudes take the largest, and a NaN in any piece stays a NaN.
    """
    starts = [
        position for position, row in enumerate(rows) if position == 0 or rows[position - 1] != row
    ]
    found = [rows[start] for start in starts]
    squares[found] = np.add.reduceat(values, starts)
    peaks[found] = np.maximum.reduceat(largest, starts)


def recount(gradients: Sequence[Tensor], norms: Norms) -> Norms:
    """Put right what one pass could not say.

    Exact norms of what overflowed or vanished, counts of NaN and Inf.

    To be called while the gradients are still those of the look.
    """
    if (
        norms.counts is None
        and norms.total < _TOO_LARGE_TO_SQUARE
        and norms.max_abs.min(initial=1) >= _TOO_SMALL_TO_SQUARE
    ):
        return norms
    # Both norms are needed: finite entries of 1e30 have an L2 norm of inf, and entries of 1e-30
    # one of zero. Only the largest entry tells overflow from an infinity.
    tiny = (norms.max_abs > 0) & (norms.max_abs < _TOO_SMALL_TO_SQUARE)
    doubtful = np.flatnonzero(~np.isfinite(norms.l2) | ~np.isfinite(norms.max_abs) | tiny)
    if not len(doubtful):
        return norms
    l2, nan, inf = norms.l2.copy(), np.zeros(len(norms.l2)), np.zeros(len(norms.l2))
    for row in doubtful.tolist():
        entries = flat(gradients[row].detach())
        nan[row] = int(torch.isnan(entries).sum())
        inf[row] = int(torch.isinf(entries).sum())
        peak = norms.max_abs[row]
        if np.isfinite(peak):
            l2[row] = peak * float(torch.linalg.vector_norm(entries.double() / peak))
    bad = bool(nan.any() or inf.any())
    return Norms(l2, norms.max_abs, (nan, inf) if bad else None, float(combine(l2)), wide=True)


def combine(l2: Floats) -> Floats:
    """The norm over the first axis of norms, without squaring what would overflow.

    A NaN among them stays a NaN.

    >>> combine(np.array([3e200, 4e200])) / 1e200
    np.float64(5.0)
    """
    if len(l2) == 0:
        return np.zeros(l2.shape[1:])
    # Divided by the largest first: squares of norms above 1e154 would overflow.
    peak = l2.max(axis=0)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = l2 / np.where((peak > 0) & np.isfinite(peak), peak, 1)
        total: Floats = np.where(np.isfinite(peak), peak * np.sqrt((ratio**2).sum(axis=0)), peak)[
            ()
        ]
    return total


def exact_norms(gradients: Sequence[Tensor]) -> Norms:
    """The plain twin of a look: a loop in float64, one gradient at a time."""
    l2, peak, nan, inf = list[float](), list[float](), list[int](), list[int]()
    for gradient in gradients:
        values = (
            gradient.detach().to_dense()
            if gradient.layout is not torch.strided
            else gradient.detach()
        )
        values = (
            torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        ).double()
        largest = float(values.abs().max()) if values.numel() else 0.0
        unit = largest if 0 < largest < float("inf") else 1.0
        l2.append(unit * float((values / unit).norm()))
        peak.append(largest)
        nan.append(int(values.isnan().sum()))
        inf.append(int(values.isinf().sum()))
    norms, largest_entries, nans, infs = (
        np.array(column, dtype=np.float64) for column in (l2, peak, nan, inf)
    )
    return Norms(norms, largest_entries, (nans, infs), float(combine(norms)))


def what_weights_are(weights: Sequence[Tensor]) -> str | None:
    """ "NaN" or "infinite" where a weight of this process is; None where all are finite.

    Asked where a gradient is broken, and never elsewhere: it waits for the device.
    """
    floating = [weight for weight in weights if weight.is_floating_point()]
    peaks = NormReading(floating).read().max_abs
    if np.isnan(peaks).any():
        return "NaN"
    return "infinite" if np.isinf(peaks).any() else None
