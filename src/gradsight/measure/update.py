"""How far one optimizer step moved each parameter, for its size: ||new - old|| / ||old||."""

import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradsight.core.devices import widest_float
from gradsight.measure.host_copy import HostCopy
from gradsight.measure.sample import Sample
from gradsight.values.measured import Floats

WIDTH = 9
"""Per parameter: entries sampled, entries in all, sums of d**2, d**4, w**2, w**4 (d the update, w
the weight before it); and of l**2, n**2, l*n (l the weight as the look before left it, n as it was
found now), where that was compared.
"""
_OF_THE_STEP = 6
"""Those columns that are of this step alone."""


SQUARED = 2
"""The column of the update's sum of squares."""


class LeftWeights:
    """Samples of the parameters as an optimizer step left them, to be compared with the next."""

    __slots__ = ("_offset", "_parts", "_tensors")

    def __init__(
        self, tensors: Sequence[Tensor], parts: Sequence[tuple[list[int], Sample]], offset: int
    ) -> None:
        self._tensors = tensors
        self._parts = parts
        self._offset = offset

    def compare(self, parameters: Sequence[Tensor]) -> list[tuple[list[int], HostCopy]]:
        """Sums of l**2, n**2 and l*n, by device; empty for other parameters than those."""
        same = len(parameters) == len(self._tensors)
        if not same or any(map(operator.is_not, parameters, self._tensors)):
            return []
        arrivals = []
        for rows, left in self._parts:
            now = Sample([parameters[row] for row in rows], self._offset)
            with torch.no_grad():
                pairs = ((left, left), (now, now), (left, now))
                wide = widest_float(left.entries.device)
                products = [one.entries.to(wide) * other.entries for one, other in pairs]
                sums = [part.sum() for each in products for part in torch.split(each, left.sizes)]
                arrivals.append((rows, HostCopy.of(torch.stack(sums))))
        return arrivals


class UpdateReading:
    """Samples of the parameters before an optimizer step, and the same entries after it."""

    __slots__ = ("_arrivals", "_before", "_offset", "_since", "_tensors")

    def __init__(
        self, parameters: Sequence[Tensor], offset: int = 0, left: LeftWeights | None = None
    ) -> None:
        """`left`: what the step before has left, where that is to be compared."""
        self._since = [] if left is None else left.compare(parameters)
        by_device: dict[torch.device, list[int]] = {}
        for row, parameter in enumerate(parameters):
            by_device.setdefault(parameter.device, []).append(row)
        self._tensors = list(parameters)
        self._offset = offset
        self._before = [
            (rows, Sample([parameters[row] for row in rows], offset)) for rows in by_device.values()
        ]
        self._arrivals: list[tuple[list[int], Sample, HostCopy]] = []

    def finish(self, keep: bool = False) -> LeftWeights | None:
        """To be called when the optimizer has stepped; the samples from before are given back.

        `keep`: whether the weights after it are to be compared with those before the next step.
        """
        parts: list[tuple[list[int], Sample]] = []
        for rows, before in self._before:
            # The same offset: the same entries, so that their difference is the update.
            after = Sample([self._tensors[row] for row in rows], self._offset)
            with torch.no_grad():
                moments = _moments(torch.split(after.entries - before.entries, before.sizes))
                moments += _moments(torch.split(before.entries, before.sizes))
                self._arrivals.append((rows, before, HostCopy.of(torch.stack(moments))))
            before.entries = before.entries.new_empty(0)
            parts.append((rows, after))
        self._before = []
        return LeftWeights(self._tensors, parts, self._offset) if keep else None

    def ready(self) -> bool:
        """Whether reading would not wait."""
        since = all(arrival.ready() for _, arrival in self._since)
        return since and all(arrival.ready() for _, _, arrival in self._arrivals)

    def read(self) -> Floats:
        """An array [n, WIDTH]; rows add up over ranks."""
        result = np.zeros((len(self._tensors), WIDTH))
        for rows, sample, arrival in self._arrivals:
            result[rows, 0], result[rows, 1] = sample.sizes, sample.full_sizes
            result[rows, 2:_OF_THE_STEP] = arrival.read().reshape(4, len(rows)).T
        for rows, since in self._since:
            result[rows, _OF_THE_STEP:] = since.read().reshape(3, len(rows)).T
        self._tensors = []
        return result


def _moments(parts: Sequence[Tensor]) -> list[Tensor]:
    """Sums of squares of the parts, then sums of fourth powers."""
    if not parts:
        return []
    wide = widest_float(parts[0].device)
    squares = [part.to(wide).square() for part in parts]
    return [square.sum() for square in squares] + [square.square().sum() for square in squares]


def detail_columns(sums: Floats) -> dict[str, Floats]:
    """Per parameter: its update-to-weight ratio, the error of that, and both by themselves."""
    if not sums.any():
        return dict.fromkeys(_COLUMNS, np.full(len(sums), np.nan))
    ratio, error = update_ratios(sums)
    weight, update = root_mean_squares(sums)
    told = (ratio, error, squares_of_whole(sums), weight, update, likeness(sums))
    return dict(zip(_COLUMNS, told, strict=True))


_COLUMNS = (
    *("update_ratio", "update_ratio_error", "weight_square", "weight_rms", "update_rms"),
    "likeness",
)


def likeness(sums: Floats) -> Floats:
    """How alike the weights are to what the look before left: a cosine; NaN if not compared."""
    left, found, both = sums[:, _OF_THE_STEP:].T
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines: Floats = both / np.sqrt(left * found)
    return cosines


def root_mean_squares(sums: Floats) -> tuple[Floats, Floats]:
    """Of the weights before the step, and of what it added; NaN where no entry was read."""
    n, _, d2, _, w2, _ = sums[:, :_OF_THE_STEP].T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(w2 / n), np.sqrt(d2 / n)


def update_ratios(
    sums: Floats,
) -> tuple[Floats, Floats]:
    """Ratio and its standard error per parameter.

    NaN where the weight is zero or there are no entries.

    With n sampled squares of mean m2 and second moment m4, the mean's relative error is
    sqrt((m4/m2**2 - 1) / n); a square root halves it; a sample without replacement of n out of N
    shrinks it by sqrt(1 - n/N).
    """
    n, size, d2, d4, w2, w4 = sums[:, :_OF_THE_STEP].T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(w2 > 0, np.sqrt(d2 / w2), np.nan)
        relative = _relative_error(n, d2, d4) ** 2 + _relative_error(n, w2, w4) ** 2
        left_out = np.clip(1 - n / size, 0, 1)
        return ratio, np.where(
            left_out > 0,
            ratio * np.sqrt(relative * left_out),
            np.where(np.isnan(ratio), np.nan, 0.0),
        )


def squares_of_whole(sums: Floats) -> Floats:
    """Sums of squares of the weights before the step, NaN where only a sample was read.

    Two samples cannot be compared.
    """
    return np.where(sums[:, 0] == sums[:, 1], sums[:, 4], np.nan)


def _relative_error(n: Floats, square: Floats, fourth: Floats) -> Floats:
    """Half the relative standard error of a mean of squares, 0 where all of them are zero."""
    spread = np.clip(n * fourth / np.where(square > 0, square, 1) ** 2 - 1, 0, None)
    return np.where(square > 0, 0.5 * np.sqrt(spread / np.maximum(n, 1)), 0.0)
