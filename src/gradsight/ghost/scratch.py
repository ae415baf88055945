"""Memory for products that are needed for a moment only."""

import torch
from torch import Tensor

SIZE = 16 << 20
"""Bytes for the products of a few samples; one sample's product is made also where it is larger."""


class Scratch:
    """The same memory for every layer.

    Kept on the CPU, whose allocator gives blocks of this size back to the system, so that each use would cost a fault per page;
    other devices' allocators keep it themselves.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}

    def take(self, like: Tensor, most: int, shape: tuple[int, int]) -> Tensor:
        """Room for matrices of this shape: for `most` of them, or for as many as fit."""
        entries, size = max(1, shape[0] * shape[1]), like.element_size()
        groups = -(-most // max(1, SIZE // (entries * size)))
        number = -(-most // groups)
        room = number * entries
        if like.device.type != "cpu" or room * size > SIZE:
            return like.new_empty(number, *shape)
        kept = self._kept.get(like.dtype)
        if kept is None or kept.numel() < room:
            self._kept[like.dtype] = kept = like.new_empty(room)
        return kept[:room].view(number, *shape)
