# mypy: allow-untyped-calls
"""LayerNorm, RMSNorm and GroupNorm: a normalised input times a weight, plus a bias."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.core.autocast import autocast_dtype
from gradsight.ghost.dots import in_wide, same_type, score_table, vector_dots
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, rule


@dataclass(slots=True)
class Scaling:
    """y = n(x) w + b: the parameters of a norm and the function n."""

    weight: Tensor | None
    bias: Tensor | None
    normalise: Callable[[Tensor], Tensor]
    features: int | None
    """The number of last dimensions that the weight spans; None: one entry per channel, which is
    dimension 1.
    """


@dataclass(slots=True)
class NormSplit:
    """How a LayerNorm is split by sample."""

    layout: SampleLayout
    sources: tuple[TangentSource | None, TangentSource | None]
    """Of the weight and of the bias."""
    eps: float


@rule(F.layer_norm)
def layer_norm(use: Use) -> Any:
    """y = n(x) w + b over the last dimensions: dw_i = sum of B_i n(x_i), db_i = sum of B_i."""
    x, shape = use.argument(0, "input"), tuple(use.argument(1, "normalized_shape"))
    weight, bias = use.argument(2, "weight"), use.argument(3, "bias")
    eps = use.argument(4, "eps", 1e-5)
    if use.source(x) is not None:
        return DECLINED
    layout = use.layout(x.shape[: x.dim() - len(shape)])
    if layout is None:
        return DECLINED
    # Summed by sample, the gradients of weight and bias are not bit for bit the plain ones.
    fused = len(shape) == 1 and weight is not None and bias is not None and not use.exact_grad
    if (
        fused
        and x.dtype == weight.dtype
        and weight.requires_grad
        and autocast_dtype(x.device.type) is None
    ):
        split = NormSplit(layout, (use.source(weight), use.source(bias)), eps)
        return SplitLayerNorm.apply(x, weight, bias, use.probe, split)

    def normalise(t: Tensor) -> Tensor:
        return F.layer_norm(t, shape, None, None, eps)

    return _scaled(use, x, layout, Scaling(weight, bias, normalise, len(shape)))


@rule(F.rms_norm)
def rms_norm(use: Use) -> Any:
    """y = n(x) w over the last dimensions, n dividing by the root of the mean square."""
    x, shape = use.argument(0, "input"), tuple(use.argument(1, "normalized_shape"))
    weight, eps = use.argument(2, "weight"), use.argument(3, "eps")
    if use.source(x) is not None:
        return DECLINED
    layout = use.layout(x.shape[: x.dim() - len(shape)])
    if layout is None:
        return DECLINED

    def normalise(t: Tensor) -> Tensor:
        return F.rms_norm(t, shape, None, eps)

    return _scaled(use, x, layout, Scaling(weight, None, normalise, len(shape)))


@rule(F.group_norm)
def group_norm(use: Use) -> Any:
    """y = n(x) w + b with one weight per channel, and statistics per sample and group."""
    x, groups = use.argument(0, "input"), use.argument(1, "num_groups")
    weight, bias = use.argument(2, "weight"), use.argument(3, "bias")
    eps = use.argument(4, "eps", 1e-5)
    layout = use.layout(x.shape[:1])
    if use.source(x) is not None or layout is None:
        return DECLINED

    def normalise(t: Tensor) -> Tensor:
        return F.group_norm(t, groups, None, None, eps)

    return _scaled(use, x, layout, Scaling(weight, bias, normalise, None))


@rule(F.batch_norm)
def fixed_batch_norm(use: Use) -> Any:
    """BatchNorm in evaluation mode: y = n(x) w + b with statistics that are not the batch's."""
    x = use.argument(0, "input")
    mean, var = use.argument(1, "running_mean"), use.argument(2, "running_var")
    weight, bias = use.argument(3, "weight"), use.argument(4, "bias")
    eps = use.argument(7, "eps", 1e-5)
    layout = use.layout(x.shape[:1])
    if use.argument(5, "training", False) or use.source(x) is not None or layout is None:
        return DECLINED

    def normalise(t: Tensor) -> Tensor:
        return F.batch_norm(t, mean, var, None, None, False, 0.0, eps)

    return _scaled(use, x, layout, Scaling(weight, bias, normalise, None))


def _scaled(use: Use, x: Tensor, layout: SampleLayout, norm: Scaling) -> Tensor:
    """The plain operation, scored by <sum of B_i n(x_i), Dw> + <sum of B_i, Db>."""
    scale, shift = use.source(norm.weight), use.source(norm.bias)
    batch, features = use.batch, norm.features

    def per_sample(values: Tensor) -> Tensor:
        rows = layout.rows(values, batch)
        if features is None:
            return rows.reshape(batch, -1, x.shape[1], values[0, 0].numel()).sum((1, 3))
        return rows.reshape(batch, -1, values.shape[-features:].numel()).sum(1)

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        grad = in_wide(grad)
        pairs = []
        if scale is not None:
            normalised = norm.normalise(same_type(saved[0], grad))
            pairs += vector_dots(per_sample(grad * normalised), scale.tangents())
        if shift is not None:
            pairs += vector_dots(per_sample(grad), shift.tangents())
        return pairs

    return use.attach(use.plain(), score, [x] if scale is not None else [])


class SplitLayerNorm(torch.autograd.Function):
    """LayerNorm whose weight and bias gradients are made sample by sample."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, probe: Tensor, split: NormSplit
    ) -> Tensor:
        """The plain operation."""
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, split.eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.split = split
        ctx.probe = probe
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, and the scores as the probe's."""
        x, mean, rstd, weight, bias = ctx.saved_tensors
        split, probe = ctx.split, ctx.probe
        need_x, need_weight, need_bias, need_scores, _ = ctx.needs_input_grad
        dx = None
        if need_x:
            dx = layer_norm_input_gradient(grad, x, mean, rstd, (weight, bias))
        grad, x, mean, rstd = (
            in_wide(split.layout.matrices(t, probe.shape[1])) for t in (grad, x, mean, rstd)
        )
        weight_source, bias_source = split.sources
        pairs: list[tuple[int, Tensor]] = []
        dw = db = None
        if need_weight:
            sums = layer_norm_sums(grad, x, mean, rstd)
            dw = sums.sum(0)
            if weight_source and need_scores:
                pairs += vector_dots(sums, weight_source.tangents())
        if need_bias:
            sums = grad.sum(1)
            db = sums.sum(0)
            if bias_source and need_scores:
                pairs += vector_dots(sums, bias_source.tangents())
        scores = score_table(pairs, probe) if need_scores else None
        return dx, dw, db, scores, None


def layer_norm_input_gradient(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, parameters: tuple[Tensor, Tensor]
) -> Tensor:
    """The gradient at a LayerNorm's input; parameters are its weight and bias."""
    weight, bias = parameters
    # torch's kernel reads the statistics as if they lay side by side in memory, whatever their
    # strides say.
    statistics = mean.contiguous(), rstd.contiguous()
    backward = torch.ops.aten.native_layer_norm_backward
    parts = grad.contiguous(), x.contiguous(), weight.shape, *statistics, weight, bias
    dx: Tensor = backward(*parts, [True, False, False])[0]
    return dx


def layer_norm_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Each sample's weight gradient [B, n], from matrices [B, T, n] and statistics [B, T, 1]."""
    return torch.bmm(rstd.transpose(1, 2), (x - mean).mul_(grad)).squeeze(1)
