"""Dots of the samples' gradients with directions, in fp32 or wider."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsight.ghost.directions import Tangents
from gradsight.ghost.sample_axis import SampleLayout

WIDE = frozenset({torch.float32, torch.float64})
"""The types that need no widening."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over positions and parameters are made in: fp32 or wider."""
    # A gradient summed from per-sample products in bf16 is 3e-3 off; in fp32 it is not.
    return dtype if dtype in WIDE else torch.promote_types(dtype, torch.float32)


def in_wide(tensor: Tensor) -> Tensor:
    """The tensor in fp32 or wider."""
    return tensor if tensor.dtype in WIDE else tensor.to(wide(tensor.dtype))


def same_type(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the type of another."""
    # A call of `to` that changes nothing costs more than the question.
    return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)


def row_dots(a: Tensor, b: Tensor, layout: SampleLayout, batch: int) -> Tensor:
    """The sum over everything but the samples of a * b, in fp32 or wider: [B].

    `a` is broadcast to b's shape.
    """
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    if a.shape != b.shape:
        a = a.expand_as(b)
    left = layout.rows(a, batch).reshape(batch, -1)
    right = layout.rows(b, batch).reshape(batch, -1)
    dots: Tensor = torch.linalg.vecdot(left.to(dtype), right.to(dtype))
    return dots


def vector_dots(vectors: Tensor, tangents: Tangents) -> list[tuple[int, Tensor]]:
    """<vector_i, D> for every slot; the samples' vectors [B, n] are in fp32 or wider."""
    return [
        (slot, torch.mv(vectors, same_type(direction.reshape(-1), vectors)))
        for slot, direction in tangents
    ]


def score_table(pairs: Sequence[tuple[int, Tensor]], like: Tensor) -> Tensor:
    """The scores of one use as a table [slots, B], as the gradient of the probe."""
    if len(like) == 1 and pairs:
        total = pairs[0][1]
        for _, scores in pairs[1:]:
            total = total + scores
        same = total.dtype == like.dtype and total.device == like.device
        return (total if same else total.to(like)).unsqueeze(0)
    table = torch.zeros_like(like)
    for slot, scores in pairs:
        table[slot] += scores.to(device=like.device, dtype=like.dtype)
    return table
