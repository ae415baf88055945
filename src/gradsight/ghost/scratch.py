"""Memory for products that are needed for a moment only."""

from typing import NamedTuple

import torch
from torch import Tensor

ON_CPU = 1 << 20
"""Bytes for the products of a few samples, so that small ones are made by one call.

A larger product is made alone: on all cores, where a batch's matrix-vector products run on one.
"""
ELSEWHERE = 16 << 20
"""The same on other devices: enough to keep one busy."""


class Room(NamedTuple):
    """Memory for some matrices of the same shape."""

    matrices: Tensor
    rows: Tensor
    """The same memory, each matrix as a row."""


class Scratch:
    """The same memory for every layer.

    Kept on the CPU, whose allocator gives blocks of this size back to the system, so that each use
    would cost a fault per page; other devices' allocators keep it themselves.
    """

    def __init__(self, most: int | None = None) -> None:
        """most: how many matrices at once, however small they are; None: as many as fit."""
        self._most = most
        self._kept: dict[torch.dtype, Tensor] = {}
        self._rooms: dict[tuple[torch.dtype, int, int, int], Room] = {}

    def take(self, like: Tensor, most: int, height: int, width: int) -> Room:
        """Room for matrices of this shape: for `most` of them, or for as many as fit."""
        key = like.dtype, most, height, width
        on_cpu = like.device.type == "cpu"
        if on_cpu and key in self._rooms:
            return self._rooms[key]
        if self._most is not None:
            most = min(most, self._most)
        entries = max(1, height * width)
        budget = ON_CPU if on_cpu else ELSEWHERE
        fitting = budget // (entries * like.element_size())
        groups = -(-most // max(1, fitting))
        number = -(-most // groups)
        if not on_cpu:
            return _room(like.new_empty(number * entries), number, height, width)
        kept = self._kept.get(like.dtype)
        if kept is None or kept.numel() < number * entries:
            self._kept[like.dtype] = kept = like.new_empty(number * entries)
            self._rooms = {k: room for k, room in self._rooms.items() if k[0] != like.dtype}
        self._rooms[key] = _room(kept[: number * entries], number, height, width)
        return self._rooms[key]


def _room(memory: Tensor, number: int, height: int, width: int) -> Room:
    return Room(memory.view(number, height, width), memory.view(number, height * width))
