"""Convolutions in one, two and three dimensions, with stride, dilation, groups and padding."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.core.autocast import autocast_dtype, autocast_to
from gradsight.ghost.dots import row_dots, score_table, vector_dots, wide
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.rules.linear import sum_and_dots
from gradsight.ghost.sample_axis import Layout
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, rule

MATERIALISE_FROM = 64
"""Output positions per sample from which the sample-by-sample weight gradient is the cheaper one.
"""


@rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(use: Use) -> Any:
    """y = x * W + b, split by sample: dW_i and db_i are the gradients of sample i's own
    convolution.
    """
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
        return project(use, x, layout, sources)
    mixed = autocast_dtype(x.device.type)
    split: Any = SplitConvolution.apply(
        x, weight, bias, use.probe, layout, sources, settings, mixed
    )  # type: ignore[no-untyped-call]
    return split


def project(
    use: Use, x: Tensor, layout: Layout, sources: tuple[TangentSource | None, TangentSource | None]
) -> Tensor:
    """The plain operation; score_i = <x_i * D, B_i> + <db_i, Db>: a convolution is linear in its
    weight.
    """
    weight_source, bias_source = sources
    options = [
        use.argument(i, n)
        for i, n in ((3, "stride"), (4, "padding"), (5, "dilation"), (6, "groups"))
    ]
    defaults = [1, 0, 1, 1]
    chosen = [d if o is None else o for o, d in zip(options, defaults, strict=True)]
    batch, mixed, device = use.batch, autocast_dtype(x.device.type), x.device.type

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = []
        for slot, direction in weight_source.tangents() if weight_source else ():
            with autocast_to(device, mixed):
                along = use.func(saved[0], direction.to(saved[0].dtype), None, *chosen)
            pairs.append((slot, row_dots(along, grad, layout, batch)))
        if bias_source:
            pairs += vector_dots(channel_sums(grad, layout, batch), bias_source.tangents())
        return pairs

    return use.attach(use.plain(), score, [x] if weight_source else [])


def channel_sums(grad: Tensor, layout: Layout, batch: int) -> Tensor:
    """Each sample's bias gradient [B, channels], in fp32 or wider."""
    over_space = grad.flatten(2).sum(2, dtype=wide(grad.dtype))
    return layout.rows(over_space, batch).reshape(batch, -1, grad.shape[1]).sum(1)


class SplitConvolution(torch.autograd.Function):
    """A convolution whose backward runs sample by sample, each weight gradient dotted with the
    directions on the way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        probe: Tensor,
        layout: Layout,
        sources: tuple[TangentSource | None, TangentSource | None],
        settings: tuple[list[int], list[int], list[int], int],
        mixed: torch.dtype | None,
    ) -> Tensor:
        """The plain operation, in automatic mixed precision's type where that is on."""
        if mixed is not None:
            x, weight, bias = (
                x.to(mixed),
                weight.to(mixed),
                None if bias is None else bias.to(mixed),
            )
        ctx.save_for_backward(x, weight)
        ctx.rest = layout, sources, settings, probe
        stride, padding, dilation, groups = settings
        with torch.autocast(x.device.type, enabled=False):
            return torch.convolution(
                x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups
            )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, and the scores as the probe's."""
        x, weight = ctx.saved_tensors
        layout, (weight_source, bias_source), (stride, padding, dilation, groups), probe = ctx.rest
        need_x, need_weight, need_bias, need_scores, *_ = ctx.needs_input_grad
        batch = probe.shape[1]
        options = (None, stride, padding, dilation, False, [0] * len(stride), groups)
        backward = torch.ops.aten.convolution_backward
        dx = backward(grad, x, weight, *options, [True, False, False])[0] if need_x else None
        dw = db = None
        pairs: list[tuple[int, Tensor]] = []
        if need_weight:
            tangents = weight_source.tangents() if weight_source and need_scores else ()
            rows = [
                layout.rows(t, batch).reshape(batch, -1, *t.shape[1:]).unbind() for t in (grad, x)
            ]
            each = (
                backward(g, xi, weight, *options, [False, True, False])[1]
                for g, xi in zip(*rows, strict=True)
            )
            dw, pairs = sum_and_dots((dw_i.reshape(-1) for dw_i in each), weight.shape, tangents)
        if need_bias:
            sums = channel_sums(grad, layout, batch)
            db = sums.sum(0)
            pairs += vector_dots(
                sums, bias_source.tangents() if bias_source and need_scores else ()
            )
        return (
            dx,
            dw,
            db,
            score_table(pairs, probe) if need_scores else None,
            None,
            None,
            None,
            None,
        )


def _settings(use: Use, dims: int) -> tuple[list[int], list[int], list[int], int] | None:
    """Stride, padding, dilation and groups as lists; None where padding is given by name."""
    raw = [
        use.argument(3, "stride", 1),
        use.argument(4, "padding", 0),
        use.argument(5, "dilation", 1),
    ]
    if any(isinstance(value, str) for value in raw):
        return None
    stride, padding, dilation = (
        [value] * dims if isinstance(value, int) else list(value) * (dims if len(value) == 1 else 1)
        for value in raw
    )
    return stride, padding, dilation, use.argument(6, "groups", 1)


def _is_short(x: Tensor, batch: int) -> bool:
    return x[0, 0].numel() * (x.shape[0] // batch) < MATERIALISE_FROM
