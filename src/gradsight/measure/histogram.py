"""Histograms of gradients by sign and power of two.

No minimum, no maximum and no sorting needed, exact bin borders.

A float32 is sign, 8 bits of exponent and 23 of mantissa. Its class is read off the bits: the
exponent is the bin, except that exponent 0 holds zero (mantissa 0) and what underflowed, and
exponent 255 holds infinity (mantissa 0) and NaN.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradsight.core.devices import is_accelerator, sent_to
from gradsight.measure.host_copy import HostCopy
from gradsight.measure.sample import Sample
from gradsight.values.histograms import Histogram
from gradsight.values.measured import Floats

COLUMNS = 2**10
"""Counters per gradient: sign, exponent, and whether the mantissa is zero."""
_EXTRA = 3
"""Behind them: how many entries were sampled, how many there are, how many of the sampled lie
within +-0.1.
"""
_ZERO = 1
"""The counter of +0: sign and exponent 0, and the mantissa is zero."""
_LOWEST_EXPONENT = -126
_FLOAT16_LEAST_EXPONENT = -14
"""Of the smallest normal number of float16."""
WIDTH = COLUMNS + _EXTRA
"""How many numbers a gradient's counters are."""


class HistogramReading:
    """Counters of n gradients, started on the device now and read on the host later as an array [n,
    COLUMNS + 3].
    """

    __slots__ = ("_parts", "_size")

    def __init__(self, gradients: Sequence[Tensor], offset: int = 0) -> None:
        self._size = len(gradients)
        by_device: dict[torch.device, list[int]] = {}
        for row, gradient in enumerate(gradients):
            by_device.setdefault(gradient.device, []).append(row)
        self._parts = []
        for rows in by_device.values():
            sample = Sample([gradients[row] for row in rows], offset)
            counts = count_classes(sample.entries, sample.sizes)
            sample.entries = sample.entries.new_empty(0)
            self._parts.append((rows, HostCopy.of(counts), sample))

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(arrival.ready() for _, arrival, _ in self._parts)

    def read(self) -> Floats:
        """The counters; they add up over ranks."""
        result = np.zeros((self._size, WIDTH))
        for rows, arrival, sample in self._parts:
            counts = arrival.read().reshape(len(rows), COLUMNS + 1)
            zeros = np.array(sample.unstored_zeros)
            result[rows, :COLUMNS] = counts[:, :COLUMNS]
            result[rows, _ZERO] += zeros
            result[rows, COLUMNS] = sample.sizes + zeros
            result[rows, COLUMNS + 1] = sample.full_sizes
            result[rows, COLUMNS + 2] = counts[:, COLUMNS] + zeros
        return result


def count_classes(entries: Tensor, sizes: Sequence[int]) -> Tensor:
    """Per run of `sizes[i]` entries: its counters by class, then how many entries lie within +-0.1.
    One flat vector.
    """
    device = entries.device
    lengths = sent_to(torch.tensor(sizes, device="cpu"), device)
    row = torch.repeat_interleave(
        torch.arange(len(sizes), device=device), lengths, output_size=entries.numel()
    )
    # Powers of two are borders that need no minimum and maximum first: torch.histc does, and takes
    # a hundred times as long as one reading of the entries.
    bits = entries.view(torch.int32)
    keys = ((bits >> 22) & 0x3FE).long()
    keys += (bits & 0x7FFFFF) == 0
    keys += row * (COLUMNS + 1)
    counts = _count(keys, len(sizes) * (COLUMNS + 1)).view(len(sizes), COLUMNS + 1)
    within = torch.zeros(len(sizes), dtype=torch.int64, device=device)
    counts[:, COLUMNS] = within.scatter_add_(0, row, (entries.abs() <= 0.1).long())
    return counts.view(-1)


def _count(keys: Tensor, size: int) -> Tensor:
    """How often each key occurs."""
    # bincount asks an accelerator for its largest key, and waits; scatter_add_ does not.
    if not is_accelerator(keys.device):
        return torch.bincount(keys, minlength=size)
    return torch.zeros(size, dtype=torch.int64, device=keys.device).scatter_add_(
        0, keys, torch.ones_like(keys)
    )


def histograms(counters: Floats, names: Sequence[str], step: int) -> list[Histogram]:
    """One histogram per gradient, and last the one over all.

    There each sampled entry stands for those it was taken from.
    """
    result = [_histogram(row, name, step) for row, name in zip(counters, names, strict=True)]
    # A sampled gradient counts as if all its entries had been read.
    weights = counters[:, COLUMNS + 1] / np.maximum(counters[:, COLUMNS], 1)
    everything = (counters * weights[:, None]).sum(axis=0)
    everything[COLUMNS] = counters[:, COLUMNS].sum()
    everything[COLUMNS + 1] = counters[:, COLUMNS + 1].sum()
    return [*result, _histogram(everything, None, step)]


def detail_columns(counters: Floats) -> dict[str, Floats]:
    """Per gradient: the share of entries that are zero, and that float16 could not hold."""
    sampled = np.maximum(counters[:, COLUMNS], 1)
    table = counters[:, :COLUMNS].reshape(len(counters), 2, 256, 2)
    zero = table[:, :, 0, 1].sum(axis=1)
    normal_in_half = 127 + _FLOAT16_LEAST_EXPONENT  # as float32 stores the exponent
    tiny = table[:, :, 1:normal_in_half].sum(axis=(1, 2, 3)) + table[:, :, 0, 0].sum(axis=1)
    return {"zero_share": zero / sampled, "tiny_share": tiny / sampled}


def share_within_a_tenth(counters: Floats) -> float:
    """The share of all gradient entries that lie within +-0.1."""
    weights = counters[:, COLUMNS + 1] / np.maximum(counters[:, COLUMNS], 1)
    return float(
        (counters[:, COLUMNS + 2] * weights).sum() / max(1.0, counters[:, COLUMNS + 1].sum())
    )


def _histogram(counters: Floats, name: str | None, step: int) -> Histogram:
    """Read one gradient's counters: [sign, exponent, mantissa is zero]."""
    table = counters[:COLUMNS].reshape(2, 256, 2)
    bins = table[:, 1:255].sum(axis=2)
    used = np.flatnonzero(bins.any(axis=0))
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    return Histogram(
        step=step,
        parameter=name,
        low=_LOWEST_EXPONENT + first,
        positive=tuple(bins[0, first:last].tolist()),
        negative=tuple(bins[1, first:last].tolist()),
        zero=float(table[:, 0, 1].sum()),
        underflow=float(table[:, 0, 0].sum()),
        inf=float(table[:, 255, 1].sum()),
        nan=float(table[:, 255, 0].sum()),
        size=int(counters[COLUMNS + 1]),
        sampled=int(counters[COLUMNS]),
    )


def exact_histogram(gradient: Tensor, name: str | None = None, step: int = 0) -> Histogram:
    """The plain twin: every entry of one gradient, classed by its value in float64."""
    values = gradient.detach().double().flatten().tolist()
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    normal = [value for value in finite if abs(value) >= 2.0**_LOWEST_EXPONENT]
    exponents = [int(np.frexp(abs(value))[1]) - 1 for value in normal]
    low, high = (
        (min(exponents), max(exponents) + 1) if exponents else (_LOWEST_EXPONENT, _LOWEST_EXPONENT)
    )
    positive, negative = [0.0] * (high - low), [0.0] * (high - low)
    for value, exponent in zip(normal, exponents, strict=True):
        (positive if value > 0 else negative)[exponent - low] += 1
    return Histogram(
        step=step,
        parameter=name,
        low=low,
        positive=tuple(positive),
        negative=tuple(negative),
        zero=float(sum(value == 0 for value in values)),
        underflow=float(sum(value != 0 for value in finite) - len(normal)),
        inf=float(sum(abs(value) == float("inf") for value in values)),
        nan=float(sum(value != value for value in values)),
        size=len(values),
        sampled=len(values),
    )
