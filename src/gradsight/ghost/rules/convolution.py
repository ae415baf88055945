# mypy: allow-untyped-calls
"""Convolutions in one, two and three dimensions, with stride, dilation, groups and padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.core.autocast import autocast_dtype, autocast_to
from gradsight.ghost.dots import row_dots, score_table, vector_dots, wide
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.rules.linear import sum_and_dots
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, rule

MATERIALISE_FROM = 64
"""Output positions per sample from which making each sample's weight gradient is cheaper."""


@dataclass(slots=True)
class ConvolutionSplit:
    """How a convolution is split by sample."""

    layout: SampleLayout
    sources: tuple[TangentSource | None, TangentSource | None]
    """Of the weight and of the bias."""
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    dtype: torch.dtype | None
    """Automatic mixed precision's, where that is on."""

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments that torch.convolution and its backward share."""
        no_output_padding = [0] * len(self.stride)
        return self.stride, self.padding, self.dilation, False, no_output_padding, self.groups


@rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(use: Use) -> Any:
    """y = x * W + b, split by sample: dW_i and db_i are those of sample i's own convolution."""
    x, weight, bias = use.argument(0, "input"), use.argument(1, "weight"), use.argument(2, "bias")
    if use.source(x) is not None or x.dim() != weight.dim():
        return DECLINED
    layout = use.layout(x.shape[:1])
    if layout is None:
        return DECLINED
    sources = use.source(weight), use.source(bias)
    settings = _settings(use, weight.dim() - 2)
    short = use.route == "project" or (use.route is None and _is_short(x, use.batch))
    if use.exact_grad or short or settings is None or not weight.requires_grad:
        return project_convolution(use, x, layout, sources)
    groups = use.argument(6, "groups", 1)
    split = ConvolutionSplit(layout, sources, *settings, groups, autocast_dtype(x.device.type))
    return SplitConvolution.apply(x, weight, bias, use.probe, split)


def project_convolution(
    use: Use,
    x: Tensor,
    layout: SampleLayout,
    sources: tuple[TangentSource | None, TangentSource | None],
) -> Tensor:
    """The plain operation; score_i = <x_i * D, B_i> + <db_i, Db>: it is linear in its weight."""
    weight_source, bias_source = sources
    settings = [
        _given(use, 3, "stride", 1),
        _given(use, 4, "padding", 0),
        _given(use, 5, "dilation", 1),
        _given(use, 6, "groups", 1),
    ]
    batch = use.batch
    device = x.device.type
    mixed = autocast_dtype(device)

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = []
        for slot, direction in weight_source.tangents() if weight_source else ():
            # Backward runs outside of the autocast that the forward pass was under.
            with autocast_to(device, mixed):
                along = use.func(saved[0], direction.to(saved[0].dtype), None, *settings)
            pairs.append((slot, row_dots(along, grad, layout, batch)))
        if bias_source:
            pairs += vector_dots(channel_sums(grad, layout, batch), bias_source.tangents())
        return pairs

    return use.attach(use.plain(), score, [x] if weight_source else [])


def channel_sums(grad: Tensor, layout: SampleLayout, batch: int) -> Tensor:
    """Each sample's bias gradient [B, channels], in fp32 or wider."""
    over_space = grad.flatten(2).sum(2, dtype=wide(grad.dtype))
    return layout.rows(over_space, batch).reshape(batch, -1, grad.shape[1]).sum(1)


class SplitConvolution(torch.autograd.Function):
    """A convolution, its weight gradient made sample by sample and dotted with the directions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        probe: Tensor,
        split: ConvolutionSplit,
    ) -> Tensor:
        """The plain operation, in automatic mixed precision's type where that is on."""
        if split.dtype is not None:
            x = x.to(split.dtype)
            weight = weight.to(split.dtype)
            bias = None if bias is None else bias.to(split.dtype)
        ctx.save_for_backward(x, weight)
        ctx.split = split
        ctx.probe = probe
        with torch.autocast(x.device.type, enabled=False):
            return torch.convolution(x, weight, bias, *split.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, and the scores as the probe's."""
        x, weight = ctx.saved_tensors
        split, probe = ctx.split, ctx.probe
        weight_source, bias_source = split.sources
        need_x, need_weight, need_bias, need_scores, _ = ctx.needs_input_grad
        batch = probe.shape[1]
        options = (None, *split.settings)
        backward = torch.ops.aten.convolution_backward
        dx = dw = db = scores = None
        if need_x:
            dx = backward(grad, x, weight, *options, [True, False, False])[0]
        pairs: list[tuple[int, Tensor]] = []
        if need_weight:
            tangents = weight_source.tangents() if weight_source and need_scores else ()
            slopes = _by_sample(grad, split.layout, batch)
            inputs = _by_sample(x, split.layout, batch)
            each = (
                backward(g, xi, weight, *options, [False, True, False])[1]
                for g, xi in zip(slopes, inputs, strict=True)
            )
            dw, pairs = sum_and_dots((dw_i.reshape(-1) for dw_i in each), weight.shape, tangents)
        if need_bias:
            sums = channel_sums(grad, split.layout, batch)
            db = sums.sum(0)
            if bias_source and need_scores:
                pairs += vector_dots(sums, bias_source.tangents())
        if need_scores:
            scores = score_table(pairs, probe)
        return dx, dw, db, scores, None


def _by_sample(tensor: Tensor, layout: SampleLayout, batch: int) -> Sequence[Tensor]:
    """Each sample's images, as a batch of their own."""
    return layout.rows(tensor, batch).reshape(batch, -1, *tensor.shape[1:]).unbind()


def _given(use: Use, position: int, name: str, default: int) -> Any:
    value = use.argument(position, name)
    return default if value is None else value


def _settings(use: Use, dims: int) -> tuple[list[int], list[int], list[int]] | None:
    """Stride, padding and dilation as lists; None where padding is given by name."""
    raw = [
        use.argument(3, "stride", 1),
        use.argument(4, "padding", 0),
        use.argument(5, "dilation", 1),
    ]
    if any(isinstance(value, str) for value in raw):
        return None
    stride, padding, dilation = (_per_dimension(value, dims) for value in raw)
    return stride, padding, dilation


def _per_dimension(value: int | Sequence[int], dims: int) -> list[int]:
    if isinstance(value, int):
        return [value] * dims
    if len(value) == 1:
        return list(value) * dims
    return list(value)


def _is_short(x: Tensor, batch: int) -> bool:
    return x[0, 0].numel() * (x.shape[0] // batch) < MATERIALISE_FROM
