# mypy: allow-untyped-calls
"""Norms in one pass: a normalised input times a weight, plus a bias."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.core.autocast import autocast_dtype
from gradsight.ghost.dots import in_wide, score_table
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.one_pass import OnePass, Pairs
from gradsight.ghost.rules.norm import layer_norm_input_gradient, layer_norm_sums
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, joined_rule


@dataclass(slots=True)
class JoinedNorm:
    """How a norm over joined rows is split."""

    one_pass: OnePass
    layout: SampleLayout
    sources: tuple[TangentSource | None, TangentSource | None]
    """Of the weight and of the bias."""
    eps: float = 0.0
    features: int | None = 1
    """The number of last dimensions that the weight spans; None: one entry per channel."""

    def parts(
        self, weight_sums: Tensor | None, bias_sums: Tensor | None, shape: torch.Size
    ) -> tuple[list[Tensor | None], Pairs, list[Tensor | None]]:
        """Weight and bias gradient, the scores, and the stand-ins' gradients."""
        gradients: list[Tensor | None] = []
        pairs: Pairs = []
        stand_ins: list[Tensor | None] = []
        nothing: list[Tensor | None] = [None] * len(self.one_pass.targets)
        for source, sums in zip(self.sources, (weight_sums, bias_sums), strict=True):
            gradient = None
            targets: list[Tensor] | None = None
            if sums is not None:
                gradient, targets, scores = self.one_pass.from_sums(source, sums, shape)
                pairs += scores
            gradients.append(gradient)
            if source is not None:
                stand_ins += nothing if targets is None else targets
        return gradients, pairs, stand_ins


@joined_rule(F.layer_norm)
def joined_layer_norm(use: Use) -> Any:
    """y = n(x) w + b over the last dimension: every row's sums of B n(x) and of B."""
    x, shape = use.argument(0, "input"), tuple(use.argument(1, "normalized_shape"))
    weight, bias = use.argument(2, "weight"), use.argument(3, "bias")
    if weight is None or bias is None or len(shape) != 1 or use.source(x) is not None:
        return DECLINED
    if autocast_dtype(x.device.type) is not None and x.device.type != "cpu":
        x = x.float()  # as autocast does there
    if not _has_kernel(x, weight):
        return DECLINED
    layout = use.layout(x.shape[: x.dim() - 1])
    if layout is None or not weight.requires_grad:
        return DECLINED
    sources = use.source(weight), use.source(bias)
    split = JoinedNorm(use.one_pass, layout, sources, use.argument(4, "eps", 1e-5))
    stand_ins = [*use.stand_ins(weight), *use.stand_ins(bias)]
    return JoinedLayerNorm.apply(x, weight, bias, use.probe, split, *stand_ins)


@joined_rule(F.rms_norm)
def joined_rms_norm(use: Use) -> Any:
    """y = n(x) w over the last dimensions."""
    x, shape = use.argument(0, "input"), tuple(use.argument(1, "normalized_shape"))
    weight = use.argument(2, "weight")
    if weight is None or not _is_plain(use, x, weight):
        return DECLINED
    layout = use.layout(x.shape[: x.dim() - len(shape)])
    if layout is None:
        return DECLINED
    normalised = F.rms_norm(x, shape, None, use.argument(3, "eps"))
    return _affine(use, normalised, weight, None, layout, len(shape))


@joined_rule(F.group_norm)
def joined_group_norm(use: Use) -> Any:
    """y = n(x) w + b with one weight per channel, and statistics per sample and group."""
    x, groups = use.argument(0, "input"), use.argument(1, "num_groups")
    weight, bias = use.argument(2, "weight"), use.argument(3, "bias")
    if weight is None or bias is None or not _is_plain(use, x, weight):
        return DECLINED
    layout = use.layout(x.shape[:1])
    if layout is None:
        return DECLINED
    normalised = F.group_norm(x, groups, None, None, use.argument(4, "eps", 1e-5))
    return _affine(use, normalised, weight, bias, layout, None)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch normalises such an input with such a weight, by itself or with autocast."""
    narrow = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == torch.float32
    return x.dtype == weight.dtype or (narrow and x.device.type == "cpu")


def _is_plain(use: Use, x: Tensor, weight: Tensor) -> bool:
    """Whether no parameter stands behind the input, and one type is computed in."""
    same = x.dtype == weight.dtype and autocast_dtype(x.device.type) is None
    return same and use.source(x) is None


def _affine(
    use: Use,
    normalised: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: SampleLayout,
    features: int | None,
) -> Tensor:
    sources = use.source(weight), use.source(bias)
    split = JoinedNorm(use.one_pass, layout, sources, features=features)
    stand_ins = [*use.stand_ins(weight), *use.stand_ins(bias)]
    scaled: Tensor = JoinedAffine.apply(normalised, weight, bias, use.probe, split, *stand_ins)
    return scaled


class JoinedLayerNorm(torch.autograd.Function):
    """LayerNorm whose weight and bias gradients are made of the training rows' alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        probe: Tensor,
        split: JoinedNorm,
        *stand_ins: Tensor,
    ) -> Tensor:
        """The plain operation."""
        with torch.autocast(x.device.type, enabled=False):
            y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, split.eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.split = split
        ctx.probe = probe
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, the scores as the probe's, and the stand-ins' parts."""
        x, mean, rstd, weight, bias = ctx.saved_tensors
        split = ctx.split
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = None
        if need_x:
            dx = layer_norm_input_gradient(grad, x, mean, rstd, (weight, bias))
        total = split.one_pass.parts.total
        grad, x, mean, rstd = (
            in_wide(split.layout.matrices(t, total)) for t in (grad, x, mean, rstd)
        )
        weight_sums = layer_norm_sums(grad, x, mean, rstd) if need_weight else None
        bias_sums = grad.sum(1) if need_bias else None
        gradients, pairs, stand_ins = split.parts(weight_sums, bias_sums, weight.shape)
        table = score_table(pairs, ctx.probe) if pairs else None
        return dx, *gradients, table, None, *stand_ins


class JoinedAffine(torch.autograd.Function):
    """n w + b, the parameters' gradients made of the training rows' alone."""

    @staticmethod
    def forward(
        ctx: Any,
        normalised: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        probe: Tensor,
        split: JoinedNorm,
        *stand_ins: Tensor,
    ) -> Tensor:
        """The plain operation."""
        ctx.save_for_backward(normalised, weight)
        ctx.split = split
        ctx.probe = probe
        shape = _broadcast_shape(weight, normalised, split)
        scaled = normalised * weight.view(shape)
        return scaled if bias is None else scaled.add_(bias.view(shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, the scores as the probe's, and the stand-ins' parts."""
        normalised, weight = ctx.saved_tensors
        split = ctx.split
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dx = grad * weight.view(_broadcast_shape(weight, normalised, split)) if need_x else None
        grad = in_wide(grad)
        weight_sums = _per_sample(grad * normalised, split) if need_weight else None
        bias_sums = _per_sample(grad, split) if need_bias else None
        gradients, pairs, stand_ins = split.parts(weight_sums, bias_sums, weight.shape)
        table = score_table(pairs, ctx.probe) if pairs else None
        return dx, *gradients, table, None, *stand_ins


def _broadcast_shape(weight: Tensor, x: Tensor, split: JoinedNorm) -> list[int]:
    if split.features is None:
        return [-1, *(1,) * (x.dim() - 2)]
    return list(weight.shape)


def _per_sample(values: Tensor, split: JoinedNorm) -> Tensor:
    """Every row's own sum [rows, n]."""
    total = split.one_pass.parts.total
    rows = split.layout.rows(values, total)
    if split.features is None:
        return rows.reshape(total, -1, values.shape[1], values[0, 0].numel()).sum((1, 3))
    return rows.reshape(total, -1, values.shape[-split.features :].numel()).sum(1)
