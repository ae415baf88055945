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

from gradsight.core.devices import is_accelerator, widest_float
from gradsight.measure.flatten import dense_real, flat
from gradsight.measure.host_copy import HostCopy
from gradsight.values.measured import Floats, Norms

PIECE = 2**19
"""Entries read at a time on the CPU: the second reading of a piece finds it in the cache."""

_TOO_SMALL_TO_SQUARE = 1e-15
_TOO_LARGE_TO_SQUARE = 1e18
_DOT_IS_PRECISE = (torch.float32, torch.float64)


class NormReading:
    """One look at a list of gradients: started on the device now, read on the host later."""

    __slots__ = ("_arrivals", "_stacked", "peaks", "pieces", "size")

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self.size = len(gradients)
        self.pieces: list[tuple[list[int], Floats]] = []
        """Once read, per device and type.

        The rows of its pieces, and an array [n, 3] of sum of squares, smallest and largest; where
        it comes from an accelerator, these are the largest magnitude with either sign.
        """
        self.peaks: list[Floats] = []
        """The same pieces' largest magnitudes."""
        on_host = _Pieces()
        elsewhere: dict[tuple[torch.device, torch.dtype], _Pieces] = {}
        with torch.no_grad():
            for row, gradient in enumerate(gradients):
                if gradient.numel() == 0:
                    continue
                if is_accelerator(gradient.device):
                    kind = (gradient.device, gradient.dtype)
                    elsewhere.setdefault(kind, _Pieces()).add(row, dense_real(gradient))
                else:
                    entries = flat(gradient)
                    for piece in (
                        torch.split(entries, PIECE) if len(entries) > PIECE else (entries,)
                    ):
                        on_host.add(row, piece)
            # One stacked vector per device and one copy: a read per parameter would wait for the
            # device as often as there are parameters.
            self._stacked = [stacked_norms(each.entries) for each in elsewhere.values()]
            pieces = list(elsewhere.values())
            if on_host.rows:
                scalars = [scalar for piece in on_host.entries for scalar in measure(piece)]
                self._stacked.append(torch.stack(scalars))
                pieces.append(on_host)
            self._arrivals = [
                (HostCopy.of(stacked), each.rows)
                for stacked, each in zip(self._stacked, pieces, strict=True)
            ]

    @property
    def arrays(self) -> int:
        """How many arrays of pieces there are: one per device and type."""
        return len(self._arrivals)

    @property
    def is_from_device(self) -> bool:
        """Whether it has a way to go."""
        return any(arrival.is_from_device for arrival, _ in self._arrivals)

    def rows(self, array: int) -> list[int]:
        """The row of every piece of an array."""
        return self._arrivals[array][1]

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(arrival.ready() for arrival, _ in self._arrivals)

    def extremes(self) -> list[Tensor]:
        """Numbers on the devices that are not finite where an entry of theirs is not."""
        return [
            stacked[1] if arrival.is_from_device else stacked.view(-1, 3)[:, 1:]
            for (arrival, _), stacked in zip(self._arrivals, self._stacked, strict=True)
        ]

    def read(self) -> Norms:
        """The numbers as far as one pass gives them."""
        self.pieces = [(rows, norm_pieces(arrival)) for arrival, rows in self._arrivals]
        self.peaks = [np.maximum(-values[:, 1], values[:, 2]) for _, values in self.pieces]
        if len(self.pieces) == 1 and len(self.pieces[0][0]) == self.size:
            squares, peaks = self.pieces[0][1][:, 0], self.peaks[0]
        else:
            squares, peaks = np.zeros(self.size), np.zeros(self.size)
            for (rows, values), largest in zip(self.pieces, self.peaks, strict=True):
                _merge(values[:, 0], largest, rows, squares, peaks)
        return with_total(np.sqrt(squares), peaks)


class _Pieces:
    """Entries that are measured together, and the rows that they are of."""

    __slots__ = ("entries", "rows")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.entries: list[Tensor] = []

    def add(self, row: int, entries: Tensor) -> None:
        self.rows.append(row)
        self.entries.append(entries)


def stacked_norms(tensors: list[Tensor]) -> Tensor:
    """Norms and largest magnitudes of tensors of one type, [2, n], on their device.

    A handful of kernels however many there are, and no copy of any. In float32 or wider: squares of
    entries are added up inside a kernel, which overflows above 1.8e19 and vanishes below 1e-19.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch._foreach_norm(tensors, 2, dtype=wide)
    peaks = torch._foreach_norm(tensors, float("inf"), dtype=wide)
    return torch.stack([*norms, *peaks]).view(2, len(tensors))


def norm_pieces(arrival: HostCopy) -> Floats:
    """An array [n, 3] of squares, smallest and largest."""
    numbers = arrival.read()
    if not arrival.is_from_device:
        return numbers.reshape(-1, 3)
    norms, peaks = numbers
    return np.stack([np.square(norms), -peaks, peaks], axis=1)


def with_total(l2: Floats, peaks: Floats) -> Norms:
    """Norms with their total; what is not finite has counts that nobody knows yet."""
    square = float(l2.dot(l2))
    # The ordinary case: nothing overflowed, so nothing is NaN or infinite.
    if 1e-60 < square < 1e60:
        return Norms(l2, peaks, None, square**0.5)
    counts = None
    if not np.isfinite(peaks).all():
        # Told apart by the largest entry: beside a NaN there may be an infinity that nobody sees.
        counts = (np.where(np.isnan(peaks), -1.0, 0.0), np.where(np.isinf(peaks), -1.0, 0.0))
    return Norms(l2, peaks, counts, float(combine(l2)), wide=True)


def measure(entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of squares, smallest and largest of some entries of the host, in float32 or wider."""
    # aminmax and dot together read a gradient as fast as memory allows; torch's foreach norm of
    # infinity takes twelve times as long, and a loop with isnan() thirty times.
    smallest, largest = torch.aminmax(entries)
    if entries.dtype in _DOT_IS_PRECISE:
        return torch.dot(entries, entries), smallest, largest
    return (
        torch.linalg.vector_norm(entries, dtype=torch.float64).square(),
        smallest.double(),
        largest.double(),
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
    counted = _counted([gradients[row] for row in doubtful.tolist()], norms.max_abs[doubtful])
    for row, (nans, infs, scaled) in zip(doubtful.tolist(), counted, strict=True):
        nan[row] = nans
        inf[row] = infs
        if np.isfinite(norms.max_abs[row]):
            l2[row] = norms.max_abs[row] * scaled
    bad = bool(nan.any() or inf.any())
    return Norms(l2, norms.max_abs, (nan, inf) if bad else None, float(combine(l2)), wide=True)


def _counted(gradients: Sequence[Tensor], peaks: Floats) -> list[list[float]]:
    """Of each gradient: how many NaN, how many infinities, and its norm in units of its peak."""
    by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for place, (gradient, peak) in enumerate(zip(gradients, peaks.tolist(), strict=True)):
        entries = flat(gradient.detach())
        unit = peak if np.isfinite(peak) and peak > 0 else 1.0
        # In float64 where there is one: a peak of 1e-40 has no reciprocal in float32.
        wide = entries.to(widest_float(entries.device))
        numbers = (
            torch.isnan(entries).sum().to(wide.dtype),
            torch.isinf(entries).sum().to(wide.dtype),
            torch.linalg.vector_norm(wide / unit),
        )
        places, scalars = by_device.setdefault(entries.device, ([], []))
        places.append(place)
        scalars += numbers
    result: list[list[float]] = [[]] * len(gradients)
    # One read per device, however many gradients are broken.
    for places, scalars in by_device.values():
        rows = HostCopy.of(torch.stack(scalars)).read().reshape(-1, 3).tolist()
        for place, row in zip(places, rows, strict=True):
            result[place] = row
    return result


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
