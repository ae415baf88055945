# mypy: allow-untyped-calls
"""Operators that torch's own fake tensors get wrong: grouped products, and some reduced losses."""

from typing import Any

import torch

aten = torch.ops.aten
REDUCED_IN_PLACE = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
}
"""Operators that write the loss of every element, then shrink that tensor to the reduced number.

Shrinking a tensor does not shrink its storage. torch's fake versions return a tensor of one number.
"""


def in_true_storage(func: Any, args: tuple[Any, ...], loss: Any) -> Any:
    """Return a fake loss in a storage as large as the one that the real operator leaves."""
    if func not in REDUCED_IN_PLACE:
        return loss
    elements = torch.broadcast_shapes(args[0].shape, args[1].shape)
    if loss.shape == elements:  # not reduced
        return loss
    return loss.new_empty(elements).resize_(loss.shape)


def is_grouped_product(func: Any) -> bool:
    """Whether an operator is torch's product of groups, as mixtures of experts use it."""
    return func is torch.ops.aten._grouped_mm.default


def grouped_shape(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None
) -> tuple[int, ...]:
    """The shape of the product: rows, columns or the summed dimension fall into groups."""
    if left.dim() == 2 and right.dim() == 2:
        assert ends is not None
        return (ends.shape[0], left.shape[0], right.shape[1])
    if left.dim() == 2:
        return (left.shape[0], right.shape[2])
    if right.dim() == 2:
        return (left.shape[1], right.shape[1])
    return (left.shape[0], left.shape[1], right.shape[2])


def grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty result as the real product lays it out: rows start at multiples of 16 bytes.

    torch's own shape function checks CUDA's rules (bf16 alone), but on the CPU the real call takes
    fp32. The bytes do not depend on how rows are spread over the groups.
    """
    shape = grouped_shape(left, right, ends)
    dtype = out_dtype or left.dtype
    alignment = 16 // dtype.itemsize
    row = -(-shape[-1] // alignment) * alignment
    strides = [row, 1]
    if len(shape) == 3:
        strides = [shape[1] * row, row, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device=left.device)


def grouped_flops(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> int:
    """Operations of a grouped product: every row or column is multiplied in its own group only."""
    shape = grouped_shape(left, right, ends)
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    total = 2 * left.shape[-1]
    for size in shape:
        total *= size
    return total
