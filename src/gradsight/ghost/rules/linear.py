# mypy: allow-untyped-calls
"""Linear layers: torch.nn.functional.linear, and addmm as in Hugging Face's Conv1D.

The packed projections of nn.MultiheadAttention are linear layers too, inside one torch function.
It is run from the inside: the same code, with its test for overrides answering no, so that every
operation in it is seen on its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.core.autocast import autocast_dtype
from gradsight.ghost.directions import Tangents
from gradsight.ghost.dots import in_wide, row_dots, same_type, score_table, vector_dots, wide
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.routes import balance_of, choose
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.scratch import Room, Scratch
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, rule


@rule(F.linear)
def linear(use: Use) -> Any:
    """y = x W^T + b, split by sample: dW_i = B_i^T A_i, db_i = the sum of B_i's rows."""
    x, weight, bias = use.argument(0, "input"), use.argument(1, "weight"), use.argument(2, "bias")
    if weight.dim() != 2 or (x.dim() < 2 and use.batch > 1):
        return DECLINED
    return split_product(use, x, weight, bias, transposed=False)


@rule(torch.addmm)
def addmm(use: Use) -> Any:
    """y = b + x W with W as [inputs, outputs], the layout of GPT-2's layers."""
    bias, x, weight = use.argument(0, "input"), use.argument(1, "mat1"), use.argument(2, "mat2")
    if len(use.args) != 3 or use.kwargs or bias.dim() != 1 or use.source(x) is not None:
        return DECLINED
    return split_product(use, x, weight, bias, transposed=True)


def split_product(
    use: Use, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Any:
    """The product, its weight and bias gradients split by sample on the route of the cost rule."""
    if use.source(x) is not None:
        return DECLINED
    layout = use.layout(x.shape[:-1])
    if layout is None:
        return DECLINED
    sources = use.source(weight), use.source(bias)
    if pick_route(use, x, weight) == "project" or not weight.requires_grad:
        return project(use, x, layout, sources, transposed)
    split = ProductSplit(layout, sources, transposed, autocast_dtype(x.device.type), use.scratch)
    return SplitProduct.apply(x, weight, bias, use.probe, split)


def pick_route(use: Use, x: Tensor, weight: Tensor) -> str:
    """The route of the cost rule, or the one that was asked for."""
    length = x.numel() // max(1, x.shape[-1]) // use.batch
    directions = max(1, use.probe.shape[0])
    balance = balance_of(x.device.type, autocast_dtype(x.device.type) or x.dtype)
    route = choose(length, weight.shape[0], weight.shape[1], directions, balance)
    if use.route is not None:
        route = use.route
    if use.exact_grad and route == "materialise":
        # A sum of per-sample products is never bit-equal to the fused one (1e-7 apart in fp32).
        route = "project"
    return route


def project(
    use: Use,
    x: Tensor,
    layout: SampleLayout,
    sources: tuple[TangentSource | None, TangentSource | None],
    transposed: bool,
) -> Tensor:
    """The plain operation; score_i = <A_i D^T, B_i> + <db_i, Db>.

    Its own gradients are left alone, bit for bit.
    """
    weight_source, bias_source = sources
    batch = use.batch

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = []
        for slot, direction in weight_source.tangents() if weight_source else ():
            matrix = direction.t() if transposed else direction
            along = F.linear(saved[0].to(grad.dtype), matrix.to(grad.dtype))
            pairs.append((slot, row_dots(along, grad, layout, batch)))
        if bias_source:
            pairs += vector_dots(bias_sums(layout.matrices(grad, batch)), bias_source.tangents())
        return pairs

    return use.attach(use.plain(), score, [x] if weight_source else [])


def bias_sums(rows: Tensor) -> Tensor:
    """Each sample's bias gradient [B, p] from its output gradients [B, T, p], in fp32 or wider."""
    # By `dtype`, not of converted rows: that would copy them.
    return rows.sum(1, dtype=wide(rows.dtype))


@dataclass(slots=True)
class ProductSplit:
    """How a product is split by sample."""

    layout: SampleLayout
    sources: tuple[TangentSource | None, TangentSource | None]
    """Of the weight and of the bias."""
    transposed: bool
    """Whether the weight is [inputs, outputs]."""
    dtype: torch.dtype | None
    """Automatic mixed precision's, where that is on."""
    scratch: Scratch


class SplitProduct(torch.autograd.Function):
    """x W^T + b, its weight gradient made sample by sample and dotted with the directions.

    The samples' products replace the one product of plain training, so they cost nothing extra.
    """

    # Between two large products the interpreter finds its caches cold: every small operation here
    # counts many times over.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor, split: ProductSplit
    ) -> Tensor:
        """The plain product."""
        ctx.split = split
        ctx.probe = probe
        dtype = split.dtype
        if dtype is None:
            ctx.save_for_backward(x, weight)
            return plain_product(x, weight, bias, split.transposed)
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return plain_product(
                x, weight, None if bias is None else bias.to(dtype), split.transposed
            )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, and the scores as the probe's."""
        x, weight = ctx.saved_tensors
        split, probe = ctx.split, ctx.probe
        weight_source, bias_source = split.sources
        need_x, need_weight, need_bias, need_scores, _ = ctx.needs_input_grad
        batch = probe.shape[1]
        rows = split.layout.matrices(grad, batch)
        pairs: list[tuple[int, Tensor]] = []
        dx = dw = db = None
        if need_bias:
            sums = bias_sums(rows)
            db = sums.sum(0)
            if bias_source and need_scores:
                pairs += vector_dots(sums, bias_source.tangents())
        if need_weight:
            tangents = weight_source.tangents() if weight_source and need_scores else ()
            inputs = split.layout.matrices(x, batch)
            left, right = (inputs, rows) if split.transposed else (rows, inputs)
            dw, dots = sum_and_dots_of_products(left, right, split.scratch, weight.shape, tangents)
            pairs += dots
        scores = score_table(pairs, probe) if need_scores else None
        # The input's gradient comes last: what the interpreter does before it is done while its
        # caches are still warm.
        if need_x:
            dx = F.linear(grad, weight) if split.transposed else grad.matmul(weight)
        return dx, dw, db, scores, None


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return F.linear(x, weight, bias)
    return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)


def sum_and_dots_of_products(
    left: Tensor, right: Tensor, scratch: Scratch, shape: torch.Size, tangents: Tangents
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """`sum_and_dots` of the matrices left_i^T right_i, small ones made several at once."""
    batch = left.shape[0]
    room = scratch.take(left, batch, left.shape[2], right.shape[2])
    size = room.rows.shape[0]
    left = left.transpose(1, 2)
    if size == 1:
        # A product of a megabyte or more is made, dotted and added alone: torch runs these calls
        # on all cores, where the matrix-vector products of a batch run on one.
        return sum_and_dots(_one_by_one(left.unbind(), right.unbind(), room), shape, tangents)
    total: Tensor | None = None
    dots: list[list[Tensor]] = [[] for _ in tangents]
    for a, b in zip(torch.split(left, size), torch.split(right, size), strict=True):
        torch.bmm(a, b, out=room.matrices[: a.shape[0]])
        rows = in_wide(room.rows[: a.shape[0]])
        for parts, (_, scores) in zip(dots, vector_dots(rows, tangents), strict=True):
            parts.append(scores)
        total = rows.sum(0) if total is None else total.add_(rows.sum(0))
    assert total is not None
    pairs = [(slot, torch.cat(parts)) for (slot, _), parts in zip(tangents, dots, strict=True)]
    return total.view(shape), pairs


def _one_by_one(left: Sequence[Tensor], right: Sequence[Tensor], room: Room) -> Iterator[Tensor]:
    """Each product as a vector: the first in memory of its own, all others in the same."""
    (matrix,), (vector,) = room.matrices.unbind(), room.rows.unbind()
    yield torch.mm(left[0], right[0]).view(-1)
    for a, b in zip(left[1:], right[1:], strict=True):
        torch.mm(a, b, out=matrix)
        yield vector


def sum_and_dots(
    vectors: Iterable[Tensor], shape: torch.Size, tangents: Tangents
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """The sum of the samples' gradients, and each one's dot with the directions, in fp32 or wider.

    The first vector's memory becomes the sum's. All the others may lie in the same memory.
    """
    total: Tensor | None = None
    directions: list[Tensor] = []
    dots: list[Tensor] = []
    for vector in vectors:
        one = in_wide(vector)
        if total is None:
            total = one
            directions = [same_type(direction.reshape(-1), one) for _, direction in tangents]
        else:
            total += one
        dots.extend(map(one.dot, directions))
    assert total is not None
    number = len(tangents)
    pairs = [(slot, torch.stack(dots[i::number])) for i, (slot, _) in enumerate(tangents)]
    return total.view(shape), pairs


COMPOSITE = frozenset({F.multi_head_attention_forward})


def descend(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of a composite function, to be run under the tracer; None for all others."""
    return _body(func) if func in COMPOSITE else None


@cache
def _body(func: Any) -> Callable[..., Any]:
    inside = {**func.__globals__, "has_torch_function": lambda tensors: False}
    body = FunctionType(func.__code__, inside, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
