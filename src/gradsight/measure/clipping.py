"""By how much gradients were scaled down between a look and the optimizer's step, found from two
small pieces of them.

The piece with the largest entry tells: scaling by a norm changes it, and so does clipping by value.
If its norm, its largest entry and the norm of a second piece all shrank alike, that is the
coefficient; if not, there is no such number.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradsight.core.shards import local_part
from gradsight.measure.flatten import dense_real, flat
from gradsight.measure.host_copy import HostCopy
from gradsight.measure.norms import PIECE, NormReading, measure, norm_pieces, stacked_norms
from gradsight.values.measured import Norms

_ALIKE = 1e-4
_ALIKE_IN_HALF = 2e-2
_UNTOUCHED = 1e-6
_SMALL = 2**14
"""Entries of a gradient that is measured again on an accelerator."""
_PROBED = 4
"""How many of them."""

Place = tuple[int, int]
"""Which of a look's arrays of pieces, and the position in it."""


class ClipProbe:
    """A few pieces of the gradients of a look, measured again when the optimizer is about to use
    them.
    """

    __slots__ = ("_after", "_alike", "_gradient_of", "_unchanged")

    def __init__(
        self,
        look: NormReading,
        allowed: Collection[int] | None,
        gradient_of: Callable[[int], Tensor],
    ) -> None:
        """`allowed`: the rows of the look that this optimizer uses, None for all.

        `gradient_of` gives a row's gradient now.
        """
        self._after: list[tuple[list[Place], HostCopy]] = []
        self._alike = _ALIKE
        self._unchanged = False
        self._gradient_of = gradient_of
        # Small pieces instead of all gradients: reading everything again would double the cost of
        # a look, and clipping scales all of it by one number anyway.
        with torch.no_grad():
            if look.is_from_device:
                self._look_on_devices(look, allowed)
            else:
                self._look_on_host(look, allowed)

    def _look_on_devices(self, look: NormReading, allowed: Collection[int] | None) -> None:
        """Measure small gradients again, without a number of the look in hand."""
        for array in range(look.arrays):
            places: list[Place] = []
            pieces: list[Tensor] = []
            for place in _small_places(look, array, allowed, self._gradient_of):
                gradient = self._gradient_of(look.rows(array)[place[1]])
                self._note_precision(gradient)
                places.append(place)
                pieces.append(dense_real(gradient.detach()))
            if pieces:
                self._after.append((places, HostCopy.of(stacked_norms(pieces))))

    def _look_on_host(self, look: NormReading, allowed: Collection[int] | None) -> None:
        for place in _places(look, allowed):
            piece = self._piece(look, place)
            if not piece.numel():
                continue
            if look.pieces and not self._after:
                before = look.pieces[place[0]][1][place[1]]
                if self._is_as_before(piece, before):
                    self._unchanged = True  # the largest entry is what it was: nothing was clipped
                    return
            self._after.append(([place], HostCopy.of(torch.stack(measure(piece)))))

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(arrival.ready() for _, arrival in self._after)

    def coefficient(self, look: NormReading, scale: float) -> float | None:
        """What the optimizer used / the gradient, where the look saw `scale` times what it would
        see now without clipping.
        """
        if self._unchanged and scale == 1.0:
            return 1.0
        ratios: list[float] = []
        for places, arrival in self._after:
            for place, after in zip(places, norm_pieces(arrival), strict=True):
                before = look.pieces[place[0]][1][place[1]]
                # What was zero and still is tells nothing.
                if not (before[2] == before[1] == 0 and after[2] == after[1] == 0):
                    ratios += _ratios(before, after, scale)
        if (
            not ratios
            or not np.isfinite(ratios).all()
            or max(ratios) - min(ratios) > self._alike * max(ratios)
        ):
            return None
        return 1.0 if abs(ratios[0] - 1) < _UNTOUCHED else float(ratios[0])

    @staticmethod
    def _is_as_before(piece: Tensor, before: npt.NDArray[np.float64]) -> bool:
        smallest, largest = torch.aminmax(piece)
        return bool(float(smallest) == before[1] and float(largest) == before[2])

    def _piece(self, look: NormReading, place: Place) -> Tensor:
        rows = look.rows(place[0])
        row = rows[place[1]]
        number = place[1] - rows.index(row)
        gradient = self._gradient_of(row)
        self._note_precision(gradient)
        entries = flat(gradient.detach())
        if entries.numel() <= PIECE:
            return entries
        return entries[number * PIECE : (number + 1) * PIECE]

    def _note_precision(self, gradient: Tensor) -> None:
        if gradient.dtype in (torch.float16, torch.bfloat16):
            self._alike = _ALIKE_IN_HALF


def _ratios(
    before: npt.NDArray[np.float64], after: npt.NDArray[np.float64], scale: float
) -> list[float]:
    with np.errstate(all="ignore"):
        norms = np.sqrt(after[0] / before[0]) * scale
        peaks = _peak(after) / _peak(before) * scale
    return [float(norms), float(peaks)]


def _small_places(
    look: NormReading,
    array: int,
    allowed: Collection[int] | None,
    gradient_of: Callable[[int], Tensor],
) -> list[Place]:
    """A few small gradients of an array, spread over the model: the largest are not read again."""
    sizes = []
    for position, row in enumerate(look.rows(array)):
        if allowed is None or row in allowed:
            size = gradient_of(row).numel()
            if size:
                sizes.append((size, position))
    small = [position for size, position in sizes if size <= _SMALL]
    if len(small) < 2:
        small = [position for _, position in sorted(sizes)[:2]]
    step = max(1, -(-len(small) // _PROBED))
    return [(array, position) for position in small[::step]]


@dataclass(frozen=True, slots=True)
class ClipReading:
    """A probe with the look that it is compared with: read when somebody needs the number."""

    probe: ClipProbe
    look: NormReading
    scale: HostCopy | None
    """The factor of a GradScaler that was in the gradients when they were looked at."""
    still_scaled: bool = False
    """Whether it is in them still when the optimizer gets them: a fused one divides by itself."""

    def ready(self) -> bool:
        """Whether reading would not wait."""
        scale_is_here = self.scale is None or self.scale.ready()
        return scale_is_here and self.look.ready() and self.probe.ready()

    def read(self) -> float | None:
        """The clip coefficient; None where there is no such number. Waits for the device."""
        if not self.look.pieces:
            self.look.read()
        factor = 1.0
        if self.scale is not None and not self.still_scaled:
            factor = self.scale.number()
        return self.probe.coefficient(self.look, factor)


def joint_coefficient(clips: Sequence[ClipReading | None]) -> float | None:
    """The one number by which every optimizer's gradients were scaled down; None without one."""
    coefficients = []
    for clip in clips:
        coefficient = None if clip is None else clip.read()
        if coefficient is None:
            return None
        coefficients.append(coefficient)
    if not coefficients:
        return None
    first = coefficients[0]
    if any(abs(each - first) > _ALIKE * first for each in coefficients):
        return None
    return first


def remaining_share(then: Norms, now: Norms) -> float | None:
    """What is left of every gradient alike, from a look till now; None where it is not one number.

    >>> look = Norms(np.array([4.0, 0.0, 2.0]), np.array([3.0, 0.0, 1.0]))
    >>> remaining_share(look, Norms(look.l2 / 2, look.max_abs / 2))
    0.5
    >>> remaining_share(look, Norms(look.l2, look.max_abs / 2)) is None
    True
    """
    before = np.concatenate([then.l2, then.max_abs])
    after = np.concatenate([now.l2, now.max_abs])
    shares = after[before > 0] / before[before > 0]
    if not len(shares) or after[before == 0].any() or not np.isfinite(shares).all():
        return None
    middle = float(np.median(shares))
    if middle <= 0 or np.abs(shares - middle).max() > _ALIKE * middle:
        return None
    return 1.0 if abs(middle - 1) < _UNTOUCHED else middle


def is_unchanged(then: NormReading, now: NormReading, factor: float) -> bool:
    """Whether the gradients of two looks are the same, row by row.

    Both have been read, on the host. `factor`: what was divided out of them in between.
    """
    before = _by_row(then) / [factor**2, factor, factor]
    with np.errstate(all="ignore"):
        return np.allclose(before, _by_row(now), rtol=_UNTOUCHED, atol=0.0, equal_nan=True)


def _by_row(look: NormReading) -> npt.NDArray[np.float64]:
    """Sum of squares, smallest and largest entry of each gradient of a look."""
    table = np.zeros((look.size, 3))
    for rows, values in look.pieces:
        np.add.at(table[:, 0], rows, values[:, 0])
        np.minimum.at(table[:, 1], rows, values[:, 1])
        np.maximum.at(table[:, 2], rows, values[:, 2])
    return table


def _places(look: NormReading, allowed: Collection[int] | None) -> list[Place]:
    """The piece with the largest entry, and a piece that is not zero of another row.

    Anything where nothing is known yet.
    """
    if not look.pieces:
        return (
            [(0, position) for position in range(min(2, len(look.rows(0))))] if look.arrays else []
        )
    found: list[tuple[float, Place]] = []
    for array, (peaks, (rows, _)) in enumerate(zip(look.peaks, look.pieces, strict=True)):
        if allowed is not None:
            peaks = np.where([row in allowed for row in rows], peaks, 0.0)
        first = int(peaks.argmax())
        found.append((float(peaks[first]), (array, first)))
        others = np.flatnonzero(peaks)
        found += [
            (-1.0, (array, int(position)))
            for position in others[:2]
            if rows[position] != rows[first]
        ][:1]
    found.sort(reverse=True)
    return [place for peak, place in found[:1] if peak > 0] + [
        place for peak, place in found if peak < 0
    ][:1]


def _peak(values: npt.NDArray[np.float64]) -> np.float64:
    """The largest magnitude, as numpy's number: a ratio of zeros is a NaN then, not an error."""
    return np.float64(max(-values[1], values[2]))


SAMPLED = 64
"""Entries of each gradient that a `ClipMeter` looks at."""


class ClipMeter:
    """The clip coefficient for those who do not look at whole gradients: from the first entries.

    Nothing here waits for the device.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._look: NormReading | None = None
        self._scale: HostCopy | None = None

    def after_backward(self, parameters: Sequence[Tensor], scale: Tensor | None) -> None:
        """Look at the gradients as backward left them, with the loss scale that they carry."""
        self._parameters = [p for p in parameters if p.grad is not None]
        self._look = NormReading(_sampled(self._parameters))
        self._scale = None if scale is None else HostCopy.of(scale.detach().reshape(1).clone())

    def before_update(self, still_scaled: bool) -> ClipReading | None:
        """Look at the gradients that reach the optimizer; None where nothing is to be told.

        `still_scaled`: the optimizer divides the loss scale out itself, after this look.
        """
        look = self._look
        self._look = None
        gone = any(p.grad is None for p in self._parameters)
        if look is None or gone or (still_scaled and self._scale is not None):
            return None
        samples = _sampled(self._parameters)
        # The look is not read yet, so the probe takes no shortcut by the largest entry: a sample
        # is of all gradients, and clipping of some others would go unnoticed.
        return ClipReading(ClipProbe(look, None, samples.__getitem__), look, self._scale)


def _sampled(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The first entries of all gradients, joined by device and type."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                entries = flat(local_part(parameter.grad))[:SAMPLED]
                kinds.setdefault((entries.device, entries.dtype), []).append(entries)
        return [torch.cat(same) for same in kinds.values()]
