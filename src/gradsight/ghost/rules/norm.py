"""LayerNorm, RMSNorm and GroupNorm: a normalised input times a weight, plus a bias."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.core.autocast import autocast_dtype
from gradsight.ghost.dots import in_wide, same_type, score_table, vector_dots
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.sample_axis import Layout
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, rule

Normalise = Callable[[Tensor], Tensor]


@rule(F.layer_norm)
def layer_norm(use: Use) -> Any:
    """y = n(x) w + b over the last dimensions: dw_i = sum of B_i n(x_i), db_i = sum of B_i."""
    x, shape = use.argument(0, "input"), tuple(use.argument(1, "normalized_shape"))
    weight, bias, eps = (
        use.argument(2, "weight"),
        use.argument(3, "bias"),
        use.argument(4, "eps", 1e-5),
    )
    if use.source(x) is not None:
        return DECLINED
    layout = use.layout(x.shape[: x.dim() - len(shape)])
    if layout is None:
        return DECLINED
    fused = len(shape) == 1 and weight is not None and bias is not None and not use.exact_grad
    if (
        fused
        and x.dtype == weight.dtype
        and weight.requires_grad
        and autocast_dtype(x.device.type) is None
    ):
        sources = use.source(weight), use.source(bias)
        split: Any = SplitLayerNorm.apply(x, weight, bias, use.probe, layout, sources, eps)  # type: ignore[no-untyped-call]
        return split
    return _scaled(
        use, x, layout, weight, bias, lambda t: F.layer_norm(t, shape, None, None, eps), len(shape)
    )


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
    return _scaled(
        use, x, layout, weight, None, lambda t: F.rms_norm(t, shape, None, eps), len(shape)
    )


@rule(F.group_norm)
def group_norm(use: Use) -> Any:
    """y = n(x) w + b with one weight per channel (dimension 1) and statistics per sample and group."""
    x, groups = use.argument(0, "input"), use.argument(1, "num_groups")
    weight, bias, eps = (
        use.argument(2, "weight"),
        use.argument(3, "bias"),
        use.argument(4, "eps", 1e-5),
    )
    layout = use.layout(x.shape[:1])
    if use.source(x) is not None or layout is None:
        return DECLINED
    return _scaled(
        use, x, layout, weight, bias, lambda t: F.group_norm(t, groups, None, None, eps), None
    )


@rule(F.batch_norm)
def fixed_batch_norm(use: Use) -> Any:
    """BatchNorm in evaluation mode: y = n(x) w + b with statistics that are not the batch's."""
    x, mean, var = (
        use.argument(0, "input"),
        use.argument(1, "running_mean"),
        use.argument(2, "running_var"),
    )
    weight, bias, eps = (
        use.argument(3, "weight"),
        use.argument(4, "bias"),
        use.argument(7, "eps", 1e-5),
    )
    layout = use.layout(x.shape[:1])
    if use.argument(5, "training", False) or use.source(x) is not None or layout is None:
        return DECLINED
    return _scaled(
        use,
        x,
        layout,
        weight,
        bias,
        lambda t: F.batch_norm(t, mean, var, None, None, False, 0.0, eps),
        None,
    )


def _scaled(
    use: Use,
    x: Tensor,
    layout: Layout,
    weight: Tensor | None,
    bias: Tensor | None,
    normalise: Normalise,
    features: int | None,
) -> Tensor:
    """The plain operation, scored by <sum of B_i n(x_i), Dw> + <sum of B_i, Db>.

    `features` counts the last dimensions that the weight spans; None: the weight has one entry per channel, dimension 1.
    """
    scale, shift, batch = use.source(weight), use.source(bias), use.batch

    def per_sample(values: Tensor) -> Tensor:
        rows = layout.rows(values, batch)
        if features is None:
            return rows.reshape(batch, -1, x.shape[1], values[0, 0].numel()).sum((1, 3))
        return rows.reshape(batch, -1, values.shape[-features:].numel()).sum(1)

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        grad, pairs = in_wide(grad), []
        if scale is not None:
            pairs += vector_dots(
                per_sample(grad * normalise(same_type(saved[0], grad))), scale.tangents()
            )
        if shift is not None:
            pairs += vector_dots(per_sample(grad), shift.tangents())
        return pairs

    return use.attach(use.plain(), score, [x] if scale is not None else [])


class SplitLayerNorm(torch.autograd.Function):
    """LayerNorm whose weight and bias gradients are made sample by sample."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        probe: Tensor,
        layout: Layout,
        sources: tuple[TangentSource | None, TangentSource | None],
        eps: float,
    ) -> Tensor:
        """The plain operation."""
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.rest = layout, sources, probe
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, and the scores as the probe's."""
        x, mean, rstd, weight, bias = ctx.saved_tensors
        layout, sources, probe = ctx.rest
        need_x, *need, need_scores, _, _, _ = ctx.needs_input_grad
        dx = None
        if need_x:
            # torch's kernel reads the statistics as if they lay side by side in memory, whatever
            # their strides say.
            parts = (
                grad.contiguous(),
                x.contiguous(),
                weight.shape,
                mean.contiguous(),
                rstd.contiguous(),
                weight,
                bias,
            )
            dx = torch.ops.aten.native_layer_norm_backward(*parts, [True, False, False])[0]
        grad, x, mean, rstd = (
            in_wide(layout.matrices(t, probe.shape[1])) for t in (grad, x, mean, rstd)
        )
        sums = [
            torch.bmm(rstd.transpose(1, 2), (x - mean).mul_(grad)).squeeze(1) if need[0] else None,
            grad.sum(1) if need[1] else None,
        ]
        pairs = []
        for source, each in zip(sources, sums, strict=True):
            if source is not None and each is not None and need_scores:
                pairs += vector_dots(each, source.tangents())
        dw, db = (None if s is None else s.sum(0) for s in sums)
        return dx, dw, db, score_table(pairs, probe) if need_scores else None, None, None, None
