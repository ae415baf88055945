"""Biases, scales and positions used by broadcasting: x + p, x * p and their kin.

Hand-written norms, as Llama's, end in one of them: weight * n(x).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsight.ghost.dots import in_wide, same_type
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.use import DECLINED, Use, rule


@rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def add(use: Use) -> Any:
    """y = x + p: score_i = the sum over i's rows of <D, B>."""
    return _broadcast(use, sign=1.0, times=False)


@rule(torch.sub, Tensor.sub, Tensor.__sub__)
def sub(use: Use) -> Any:
    """y = x - p: the same with the other sign."""
    return _broadcast(use, sign=-1.0, times=False)


@rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)
def mul(use: Use) -> Any:
    """y = x p: score_i = the sum over i's rows of <D, B x>."""
    return _broadcast(use, sign=1.0, times=True)


def _broadcast(use: Use, sign: float, times: bool) -> Any:
    """Score the one carried operand of two, which is broadcast over the other's samples."""
    if len(use.args) != 2 or use.kwargs or not all(isinstance(a, Tensor) for a in use.args):
        return DECLINED
    first, second = (use.source(a) for a in use.args)
    if (first is None) == (second is None) or (sign < 0 and second is None):
        return DECLINED
    if second is None:
        source = first
        parameter, other = use.args
    else:
        source = second
        other, parameter = use.args
    shape = torch.broadcast_shapes(parameter.shape, other.shape)  # type: ignore[no-untyped-call]
    layout = use.layout(shape)
    if layout is None or other.dim() < len(shape):
        return DECLINED
    assert source is not None
    batch = use.batch

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        values = in_wide(grad)
        if times:
            values = values * same_type(saved[0], values)
        sums = sum_to_samples(values, parameter.shape, layout, batch)
        return [
            (slot, sign * _dots(sums, same_type(d, sums), layout, len(shape), batch))
            for slot, d in source.tangents()
        ]

    return use.attach(use.plain(), score, [other] if times else [])


def sum_to_samples(values: Tensor, shape: torch.Size, layout: SampleLayout, batch: int) -> Tensor:
    """[B, ...], summed over every dimension that the parameter is broadcast along."""
    rows = layout.rows(values, batch)
    full = (1,) * (values.dim() - len(shape)) + tuple(shape)
    # Strides of a tensor without memory tell which dimensions a layout makes of the broadcast ones.
    kept = layout.rows(torch.empty(full, device="meta").expand_as(values), batch) if full else rows
    summed = [d for d in range(1, rows.dim()) if kept.stride(d) == 0 and rows.shape[d] > 1]
    if not summed:
        return rows
    return rows.sum(summed, keepdim=True)


def _dots(sums: Tensor, direction: Tensor, layout: SampleLayout, rank: int, batch: int) -> Tensor:
    """<sums_i, D>, D broadcast to the shape of one sample, or with a part for each sample."""
    full = direction.reshape((1,) * (rank - direction.dim()) + tuple(direction.shape))
    if layout.kind != "all" and full.shape[layout.dim] > 1:
        along = layout.rows(full, batch)
    elif layout.kind == "all":
        along = layout.rows(full, 1)
    elif layout.kind == "plain":
        along = full.movedim(layout.dim, 0)
    else:
        along = full.unsqueeze(layout.dim).movedim(layout.dim, 0)
    return (sums * along).reshape(batch, -1).sum(1)
