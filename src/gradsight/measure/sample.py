"""Evenly spread samples of many tensors in one buffer, so that what follows costs the same however
large the model is.
"""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from gradsight.measure.flatten import flat

BUDGET = 2**22
"""Entries sampled in one look, over all tensors."""
LARGEST = 2**16
"""Entries sampled of one tensor at the most; smaller tensors are read in full."""


def stride_for(size: int, wanted: int, shape: Sequence[int]) -> int:
    """The smallest step through `size` entries that takes at most `wanted`, and visits rows and
    columns alike.

    A step that shares a factor with a dimension would see only some of its columns.

    >>> stride_for(768 * 768, 2**16, (768, 768))
    11
    """
    stride = max(1, -(-size // wanted))
    while stride > 1 and any(gcd(stride, extent) > 1 for extent in shape if extent > 1):
        stride += 1
    return stride


class Sample:
    """The sampled entries of some tensors of one device.

    One float32 buffer, `sizes[i]` entries of tensor i in turn. A sparse tensor stores few of its
    zeros: only stored entries are in the buffer, and `unstored_zeros[i]` is the number of other
    zeros that go with them.
    """

    __slots__ = ("entries", "full_sizes", "sizes", "unstored_zeros")

    def __init__(self, tensors: Sequence[Tensor], offset: int = 0) -> None:
        # A share per tensor, not per entry: small layers would not be seen beside an embedding.
        wanted = min(LARGEST, max(1, BUDGET // max(1, len(tensors))))
        parts = []
        self.full_sizes = []
        self.unstored_zeros = []
        with torch.no_grad():
            for tensor in tensors:
                entries = flat(tensor)
                stride = stride_for(entries.numel(), wanted, tensor.shape)
                part = entries[offset % stride :: stride]
                full_size = tensor.numel() * (2 if tensor.is_complex() else 1)
                # Zeros are counted in the proportion in which stored entries are sampled.
                proportion = part.numel() / entries.numel() if entries.numel() else 1.0
                self.unstored_zeros.append(round((full_size - entries.numel()) * proportion))
                self.full_sizes.append(full_size)
                parts.append(_to_float32(part))
            self.sizes = [part.numel() for part in parts]
            self.entries = torch.cat(parts)


def _to_float32(entries: Tensor) -> Tensor:
    """Entries in float32.

    Doubles beyond its range keep their class: finite stays finite, nonzero stays nonzero.
    """
    if entries.dtype is not torch.float64:
        return entries.float()
    info = torch.finfo(torch.float32)
    narrow = torch.where(entries.isinf(), entries, entries.clamp(info.min, info.max)).float()
    vanished = (narrow == 0) & (entries != 0)
    return torch.where(vanished, torch.sign(entries).float() * info.smallest_normal / 2, narrow)
