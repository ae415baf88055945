# mypy: allow-untyped-calls
"""Biases, scales and positions in one pass, used by broadcasting: x + p, x - p, x * p."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsight.ghost.dots import in_wide, same_type, score_table
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.one_pass import OnePass
from gradsight.ghost.rules.elementwise import sum_to_samples
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, joined_rule


@dataclass(slots=True)
class JoinedBroadcast:
    """How x + p, x - p or x * p over joined rows is split."""

    one_pass: OnePass
    source: TangentSource
    layout: SampleLayout
    sign: float
    times: bool


@joined_rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def joined_add(use: Use) -> Any:
    """y = x + p: every row's gradient of p is the sum of B over what p is broadcast along."""
    return _broadcast(use, sign=1.0, times=False)


@joined_rule(torch.sub, Tensor.sub, Tensor.__sub__)
def joined_sub(use: Use) -> Any:
    """y = x - p: the same with the other sign."""
    return _broadcast(use, sign=-1.0, times=False)


@joined_rule(
    torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply
)
def joined_mul(use: Use) -> Any:
    """y = x p: the same sum of B x."""
    return _broadcast(use, sign=1.0, times=True)


def _broadcast(use: Use, sign: float, times: bool) -> Any:
    if len(use.args) != 2 or use.kwargs or not all(isinstance(a, Tensor) for a in use.args):
        return DECLINED
    first, second = (use.source(a) for a in use.args)
    if (first is None) == (second is None) or (sign < 0 and second is None):
        return DECLINED
    x, p, source = use.args[0], use.args[1], second
    if source is None:
        x, p, source = use.args[1], use.args[0], first
    assert source is not None
    if p.dim() > x.dim() or torch.broadcast_shapes(x.shape, p.shape) != x.shape:
        return DECLINED
    layout = use.layout(x.shape)
    if layout is None:
        return DECLINED
    place = layout.dim - (x.dim() - p.dim())
    if place >= 0 and p.shape[place] != 1:
        return DECLINED  # p has a part of its own for each sample
    split = JoinedBroadcast(use.one_pass, source, layout, sign, times)
    return JoinedSum.apply(x, p, use.probe, split, *use.stand_ins(p))


class JoinedSum(torch.autograd.Function):
    """x + p, x - p or x * p, the gradient of p made of the training rows' alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Tensor, probe: Tensor, split: JoinedBroadcast, *stand_ins: Tensor
    ) -> Tensor:
        """The plain operation."""
        ctx.split = split
        ctx.probe = probe
        ctx.shape = p.shape
        if split.times:
            ctx.save_for_backward(x, p)
            return x * p
        return x + p if split.sign > 0 else x - p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and p, the scores as the probe's, and the stand-ins' parts."""
        split = ctx.split
        one_pass = split.one_pass
        values = in_wide(grad)
        dx = grad
        if split.times:
            x, p = ctx.saved_tensors
            dx = grad * p
            values = values * same_type(x, values)
        sums = sum_to_samples(values, ctx.shape, split.layout, one_pass.parts.total)
        sums = split.sign * sums.reshape(one_pass.parts.total, -1)
        gradient, targets, pairs = one_pass.from_sums(split.source, sums, ctx.shape)
        stand_ins = [None] * len(one_pass.targets) if targets is None else targets
        table = score_table(pairs, ctx.probe) if pairs else None
        return dx, gradient, table, None, *stand_ins
