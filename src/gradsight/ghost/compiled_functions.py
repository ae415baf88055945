# mypy: allow-untyped-calls, disable-error-code="no-untyped-def"
"""Rules that a compiler can trace: functions of tensors and numbers, without side effects.

They are those of one pass (joined_rules/) and of two (rules/), samples in dimension 0. `sizes` is
(B,) in two passes, where the directions are among the arguments, and (B, V1, V2, ...) in one pass,
where each target's direction is made of its own rows, and scaled by an optimizer's second moments
where these are among the arguments.
Scores are the gradient of a probe [targets, B]. What a tied head owes its embedding travels as the
gradient of two wires, tensors of zeros that take no memory: autograd keeps the order, and a
compiler sees nothing but gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = tuple[int, ...]
TargetScores = list[Tensor]
"""By target, those of the training rows."""


def at_least_float(x: Tensor) -> Tensor:
    """In fp32, or wider where it is so already."""
    return x if x.dtype == torch.float64 else x.float()


def target_rows(x: Tensor, sizes: Sizes, number: int) -> Tensor:
    """The rows of a target, by its number from 0."""
    start = sum(sizes[: number + 1])
    return x[start : start + sizes[number + 1]]


def directions_of(
    make: Callable[[int], Tensor], sizes: Sizes, given: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Each target's direction: as given, or in one pass made of its rows, and scaled."""
    if len(sizes) == 1:
        return given
    made = [make(number) for number in range(len(sizes) - 1)]
    return [each * scale_of(*given) for each in made] if given else made


def scale_of(second: Tensor, correction: Tensor) -> Tensor:
    """1 / (sqrt(v) + eps), from second moments, and the correction for their start with eps."""
    return ((second / correction[0]).sqrt() + correction[1]).reciprocal()


def probe_gradient(scores: TargetScores, dtype: torch.dtype) -> Tensor:
    """The gradient of a probe."""
    return torch.stack(scores).to(dtype)


def sample_matrices(x: Tensor, rows: int) -> Tensor:
    """[samples, positions, features]."""
    return x.reshape(rows, -1, x.shape[-1])


def traced_product(left: Tensor, right: Tensor) -> Tensor:
    """The sum of left^T right over samples and positions."""
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


class TracedProduct(torch.autograd.Function):
    """x W^T + b; with wires where the weight is an embedding's too, in one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x,
        weight,
        bias,
        weight_probe,
        bias_probe,
        sizes,
        scores_bias,
        wires,
        count,
        *tensors,
    ) -> Tensor:
        """The plain product.

        A bias that is scored without a probe of its own shares the weight's. Tensors: with
        `wires` the head's wire, the debt's and the targets' tokens, then as many as `count` of the
        weight, the others of the bias.
        """
        ctx.sizes = sizes
        ctx.wires = wires
        ctx.count = count
        ctx.scores_weight = weight_probe is not None
        ctx.scores_bias = scores_bias
        ctx.shares = scores_bias and bias_probe is None
        probe = weight_probe if weight_probe is not None else bias_probe
        ctx.dtype = probe.dtype
        kept = tensors[2:] if wires else tensors
        ctx.save_for_backward(x, weight, *kept)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of the training rows, the scores, and what goes along the wires."""
        with torch.autocast(grad.device.type, enabled=False):
            x, weight, *kept = ctx.saved_tensors
            sizes = ctx.sizes
            n = sizes[0]
            slopes = sample_matrices(grad, sum(sizes))
            inputs = sample_matrices(x, sum(sizes))
            tokens = kept.pop(0) if ctx.wires else None
            for_weight = kept[: ctx.count]
            for_bias = kept[ctx.count :]
            dw: Any = None
            db: Any = None
            weight_table: Any = None
            bias_table: Any = None
            wires: list[Tensor | None] = []
            if ctx.scores_weight:
                dw = traced_product(slopes[:n], inputs[:n])
                made = [
                    traced_product(target_rows(slopes, sizes, k), target_rows(inputs, sizes, k))
                    for k in range(len(sizes) - 1)
                ]
                along = directions_of(lambda k: at_least_float(made[k]), sizes, for_weight)
                weight_table = probe_gradient(
                    [projected_dots(inputs[:n], slopes[:n], each) for each in along], ctx.dtype
                )
                if tokens is not None:
                    owed = torch.einsum("bts,btd->bsd", slopes[:n][:, :, tokens], inputs[:n])
                    wires = [torch.stack(made), owed, None]
            if ctx.scores_bias:
                sums = at_least_float(slopes).sum(1)
                db = sums[:n].sum(0).to(grad.dtype)
                along = directions_of(lambda k: target_rows(sums, sizes, k).sum(0), sizes, for_bias)
                bias_table = probe_gradient(
                    [sums[:n] @ at_least_float(each) for each in along], ctx.dtype
                )
            dx = grad @ weight
            if ctx.shares:
                weight_table = weight_table + bias_table
                bias_table = None
        nothing = [None] * (len(kept))
        return dx, dw, db, weight_table, bias_table, None, None, None, None, *wires, *nothing


def projected_dots(inputs: Tensor, slopes: Tensor, direction: Tensor) -> Tensor:
    """<B_i^T A_i, D> of every sample, as <A_i D^T, B_i>: its gradient is not made."""
    shown = inputs @ direction.to(inputs.dtype).t()
    return (at_least_float(shown) * at_least_float(slopes)).sum((1, 2))


def table_gradient(grad: Tensor, index: Tensor, rows: int, padding: int) -> Tensor:
    """The gradient of a table of so many rows."""
    made: Tensor = torch.ops.aten.embedding_dense_backward(
        grad.contiguous(), index, rows, padding, False
    )
    return made


def traced_lookups(index: Tensor, grad: Tensor, direction: Tensor, padding: int) -> Tensor:
    """<D[index], B> of every sample, nothing at padding_idx."""
    dots = (F.embedding(index, at_least_float(direction)) * at_least_float(grad)).sum(-1)
    if padding >= 0:
        dots = dots.masked_fill(index == padding, 0.0)
    return dots.flatten(1).sum(1)


class TracedLookup(torch.autograd.Function):
    """W[index]."""

    @staticmethod
    def forward(ctx: Any, index, weight, probe, sizes, padding, *given) -> Any:
        """The plain lookup."""
        ctx.save_for_backward(index, *given)
        ctx.rows = weight.shape[0]
        ctx.sizes = sizes
        ctx.padding = padding
        ctx.dtype = probe.dtype
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The training rows' gradient, and the scores."""
        index, *given = ctx.saved_tensors
        sizes = ctx.sizes
        n = sizes[0]
        dw = table_gradient(grad[:n], index[:n], ctx.rows, ctx.padding)

        def direction(k: int) -> Tensor:
            rows = target_rows(grad, sizes, k), target_rows(index, sizes, k)
            return table_gradient(*rows, ctx.rows, ctx.padding)

        along = directions_of(direction, sizes, given)
        scores = [traced_lookups(index[:n], grad[:n], each, ctx.padding) for each in along]
        return None, dw, probe_gradient(scores, ctx.dtype), None, None, *[None for _ in given]


class TracedTiedLookup(torch.autograd.Function):
    """W[index] in one pass, and the wires for a head that is tied to W."""

    @staticmethod
    def forward(ctx: Any, index, weight, probe, sizes, padding, *given) -> Any:
        """The plain lookup, and two wires."""
        ctx.save_for_backward(index, *given)
        ctx.rows = weight.shape[0]
        ctx.sizes = sizes
        ctx.padding = padding
        ctx.dtype = probe.dtype
        zero = weight.new_zeros(())
        tokens = index[sizes[0] :].numel()
        head = zero.expand(len(sizes) - 1, *weight.shape)
        owed = zero.expand(sizes[0], tokens, weight.shape[1])
        return F.embedding(index, weight), head, owed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, head: Tensor, owed: Tensor) -> Any:
        """The training rows' gradient, and the scores along both parts of the direction."""
        index, *given = ctx.saved_tensors
        sizes = ctx.sizes
        n = sizes[0]
        dw = table_gradient(grad[:n], index[:n], ctx.rows, ctx.padding)

        def direction(k: int) -> Tensor:
            rows = target_rows(grad, sizes, k), target_rows(index, sizes, k)
            return at_least_float(table_gradient(*rows, ctx.rows, ctx.padding)) + at_least_float(
                head[k]
            )

        along = directions_of(direction, sizes, given)
        scores = []
        start = 0
        for k, each in enumerate(along):
            tokens = target_rows(index, sizes, k).reshape(-1)
            # The direction has the rows gv_s at the tokens s, which the head's gradients meet.
            rows = at_least_float(target_rows(grad, sizes, k).reshape(-1, grad.shape[-1]))
            if given:
                rows = rows * scale_of(given[0][tokens], given[1])
            if ctx.padding >= 0:
                rows = rows.masked_fill((tokens == ctx.padding).unsqueeze(-1), 0.0)
            mine = at_least_float(owed[:, start : start + tokens.shape[0]])
            start = start + tokens.shape[0]
            cross = torch.einsum("bsd,sd->b", mine, rows)
            scores.append(traced_lookups(index[:n], grad[:n], each, ctx.padding) + cross)
        return None, dw, probe_gradient(scores, ctx.dtype), None, None, *[None for _ in given]


class TracedScale(torch.autograd.Function):
    """x p, the parameter being broadcast over samples."""

    @staticmethod
    def forward(ctx: Any, x, parameter, probe, sizes, *given) -> Tensor:
        """The plain product."""
        ctx.save_for_backward(x, parameter, *given)
        ctx.sizes = sizes
        ctx.dtype = probe.dtype
        return x * parameter  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of the training rows, and the scores."""
        x, parameter, *given = ctx.saved_tensors
        sums = sums_of_rows(
            at_least_float(grad) * at_least_float(x), parameter.shape, sum(ctx.sizes)
        )
        own, scores = small_parts(sums, ctx.sizes, given)
        own = own.view(parameter.shape).to(parameter.dtype)
        dx = (grad * parameter).to(x.dtype)
        return dx, own, probe_gradient(scores, ctx.dtype), None, *[None for _ in given]


class TracedShift(torch.autograd.Function):
    """x + p, the parameter being broadcast over samples."""

    @staticmethod
    def forward(ctx: Any, x, parameter, probe, sizes, *given) -> Tensor:
        """The plain sum."""
        ctx.save_for_backward(*given)
        ctx.shape = parameter.shape
        ctx.types = (x.dtype, parameter.dtype, probe.dtype)
        ctx.sizes = sizes
        return x + parameter  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of the training rows, and the scores."""
        given = ctx.saved_tensors
        of_x, of_parameter, of_scores = ctx.types
        sums = sums_of_rows(at_least_float(grad), ctx.shape, sum(ctx.sizes))
        own, scores = small_parts(sums, ctx.sizes, given)
        own = own.view(ctx.shape).to(of_parameter)
        return grad.to(of_x), own, probe_gradient(scores, of_scores), None, *[None for _ in given]


def sums_of_rows(slopes: Tensor, shape: Sequence[int], rows: int) -> Tensor:
    """Every sample's own gradient [rows, n] of a parameter that is broadcast over samples."""
    if len(shape) == 1:
        return slopes.reshape(rows, -1, shape[0]).sum(1)
    # Of as many dimensions as a sample has, or with a 1 in the place of the samples.
    own = list(shape)[-(slopes.dim() - 1) :]
    own = [1] * (slopes.dim() - 1 - len(own)) + own
    over = [d + 1 for d, size in enumerate(own) if size == 1]
    if over:
        slopes = slopes.sum(over, keepdim=True)
    return slopes.reshape(rows, -1)


def small_parts(sums: Tensor, sizes: Sizes, given: Sequence[Tensor]) -> tuple[Tensor, TargetScores]:
    """The training rows' gradient [n] and their scores, from every row's own gradient [rows, n]."""
    n = sizes[0]
    flat = [each.reshape(-1) for each in given]
    along = directions_of(lambda k: target_rows(sums, sizes, k).sum(0), sizes, flat)
    return sums[:n].sum(0), [sums[:n] @ at_least_float(each) for each in along]


class SplitLoss(torch.autograd.Function):
    """The training loss; each target's is pulled back with `seed`, whatever multiplies this."""

    @staticmethod
    def forward(ctx: Any, seed, training, *targets) -> Tensor:
        """The value of the training loss."""
        ctx.save_for_backward(seed)
        ctx.number = len(targets)
        return training.clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient for training, and each target's own beginning."""
        (seed,) = ctx.saved_tensors
        start = seed.to(grad.dtype).reshape(grad.shape)
        return None, grad, *[start for _ in range(ctx.number)]
