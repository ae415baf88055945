"""Linear layers: torch.nn.functional.linear, and addmm as in Hugging Face's Conv1D."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.ghost.carriers import Carrier, Tangents
from gradsight.ghost.fallback import row_dots, score_table
from gradsight.ghost.gram import Factor, gram_dots
from gradsight.ghost.layout import Layout
from gradsight.ghost.routes import choose
from gradsight.ghost.rules.registry import DECLINED, rule
from gradsight.ghost.tangent import autocast_dtype

if TYPE_CHECKING:
    from gradsight.ghost.use import Use


@rule(F.linear)
def linear(use: "Use") -> Any:
    """y = x W^T + b, split by sample: dW_i = B_i^T A_i, db_i = the sum of B_i's rows."""
    x, weight, bias = use.argument(0, "input"), use.argument(1, "weight"), use.argument(2, "bias")
    if weight.dim() != 2 or (x.dim() < 2 and use.batch > 1):
        return DECLINED
    return split_product(use, x, weight, bias, transposed=False)


@rule(torch.addmm)
def addmm(use: "Use") -> Any:
    """y = b + x W with W as [inputs, outputs], the layout of GPT-2's layers."""
    bias, x, weight = use.argument(0, "input"), use.argument(1, "mat1"), use.argument(2, "mat2")
    if len(use.args) != 3 or use.kwargs or bias.dim() != 1 or use.carrier(x) is not None:
        return DECLINED
    return split_product(use, x, weight, bias, transposed=True)


def split_product(use: "Use", x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Any:
    """The product with its weight and bias gradients split by sample, on the route that the cost rule picks."""
    if use.carrier(x) is not None:
        return DECLINED
    layout = use.layout(x.shape[:-1])
    if layout is None:
        return DECLINED
    carriers = use.carrier(weight), use.carrier(bias)
    route, factors = pick_route(use, x, weight)
    if route == "gram" and factors is not None:
        return gram(use, x, layout, factors, carriers[1])
    if route == "project" or not weight.requires_grad:
        return project(use, x, layout, carriers, transposed)
    dtype = autocast_dtype(x.device.type)
    split: Any = SplitProduct.apply(x, weight, bias, use.probe, layout, carriers, transposed, dtype)  # type: ignore[no-untyped-call]
    return split


def pick_route(use: "Use", x: Tensor, weight: Tensor) -> tuple[str, list[list[Factor]] | None]:
    """The route of the cost rule, or the one that was asked for; materialise is out where the gradient must be exact."""
    factors = use.factors(weight)
    positions = None if factors is None else max(sum(a.shape[0] for a, _ in uses) for uses in factors)
    length = x.numel() // max(1, x.shape[-1]) // use.batch
    directions = max(1, use.probe.shape[0])
    route = choose(length, weight.shape[0], weight.shape[1], directions, positions)
    if use.route is not None and (use.route != "gram" or factors is not None):
        route = use.route
    return ("project" if use.exact_grad and route == "materialise" else route), factors


def gram(use: "Use", x: Tensor, layout: Layout, factors: list[list[Factor]], bias_carrier: Carrier | None) -> Tensor:
    """The plain operation; score_i = the sum over i's positions of (A A_v^T) * (B B_v^T), and the bias's part."""
    batch = use.batch

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = []
        for slot, uses in enumerate(factors):
            dots = gram_dots(saved[0], grad, uses)
            pairs.append((slot, layout.rows(dots, batch).reshape(batch, -1).sum(1)))
        if bias_carrier:
            pairs += bias_dots(bias_sums(grad, layout, batch), bias_carrier.tangents())
        return pairs

    return use.attach(use.plain(), score, [x])


def project(use: "Use", x: Tensor, layout: Layout, carriers: tuple[Carrier | None, Carrier | None], transposed: bool) -> Tensor:
    """The plain operation; score_i = <A_i D^T, B_i> + <db_i, Db>, leaving its own gradients bit for bit alone."""
    weight_carrier, bias_carrier = carriers
    batch = use.batch

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = []
        for slot, direction in weight_carrier.tangents() if weight_carrier else ():
            matrix = direction.t() if transposed else direction
            along = F.linear(saved[0].to(grad.dtype), matrix.to(grad.dtype))
            pairs.append((slot, row_dots(along, grad, layout, batch)))
        if bias_carrier:
            pairs += bias_dots(bias_sums(grad, layout, batch), bias_carrier.tangents())
        return pairs

    return use.attach(use.plain(), score, [x] if weight_carrier else [])


def bias_sums(grad: Tensor, layout: Layout, batch: int) -> Tensor:
    """Each sample's bias gradient [B, p], in fp32 or wider."""
    rows = layout.rows(grad, batch)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return rows.sum(dim=tuple(range(1, rows.dim() - 1)), dtype=wide) if rows.dim() > 2 else rows.to(wide)


def bias_dots(sums: Tensor, tangents: Tangents) -> list[tuple[int, Tensor]]:
    """<db_i, Db> for every slot."""
    return [(slot, sums @ direction.reshape(-1).to(sums.dtype)) for slot, direction in tangents]


class SplitProduct(torch.autograd.Function):
    """x W^T + b whose weight gradient is made sample by sample, each dotted with the directions on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        probe: Tensor,
        layout: Layout,
        carriers: tuple[Carrier | None, Carrier | None],
        transposed: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """The plain product, in automatic mixed precision's type where that is on."""
        if dtype is not None:
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.rest = layout, carriers, transposed, probe.detach()
        with torch.autocast(x.device.type, enabled=False):
            if not transposed:
                return F.linear(x, weight, bias)
            return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, and the scores as the probe's."""
        x, weight = ctx.saved_tensors
        layout, (weight_carrier, bias_carrier), transposed, probe = ctx.rest
        need_x, need_weight, need_bias, need_scores, *_ = ctx.needs_input_grad
        batch = probe.shape[1]
        pairs: list[tuple[int, Tensor]] = []
        dx = dw = db = None
        if need_x:
            dx = F.linear(grad, weight) if transposed else grad.matmul(weight)
        if need_weight:
            tangents = weight_carrier.tangents() if weight_carrier and need_scores else ()
            left, right = (x, grad) if transposed else (grad, x)
            dw, pairs = split_outer(left, right, layout, batch, tangents)
        if need_bias:
            sums = bias_sums(grad, layout, batch)
            db = sums.sum(0)
            pairs += bias_dots(sums, bias_carrier.tangents() if bias_carrier and need_scores else ())
        return dx, dw, db, score_table(pairs, probe) if need_scores else None, None, None, None, None


def split_outer(
    left: Tensor, right: Tensor, layout: Layout, batch: int, tangents: Tangents
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """The sum over samples of left_i^T right_i, and each sample's dot with the directions.

    One product at a time, so the scratch is one weight's worth.
    """
    rows, columns = (layout.rows(t, batch).reshape(batch, -1, t.shape[-1]).unbind() for t in (left, right))
    return sum_and_dots(_products(rows, columns), left.dtype, tangents)


def _products(rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Iterator[Tensor]:
    """rows_i^T columns_i, the first in memory of its own, the others all in the same."""
    yield torch.mm(rows[0].t(), columns[0])
    scratch = rows[0].new_empty(rows[0].shape[-1], columns[0].shape[-1]) if len(rows) > 1 else rows[0]
    for a, b in zip(rows[1:], columns[1:], strict=True):
        yield torch.mm(a.t(), b, out=scratch)


def sum_and_dots(
    gradients: Iterable[Tensor], dtype: torch.dtype, tangents: Tangents
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """The sum of the samples' gradients, and each one's dot with the directions, in fp32 or wider.

    The gradients come one by one. The sum is made in the memory of the first; the others may all come in the same.
    """
    wide = torch.promote_types(dtype, torch.float32)
    directions = [direction.to(wide).reshape(-1) for _, direction in tangents]
    dots: list[list[Tensor]] = [[] for _ in tangents]
    total: Tensor | None = None
    for gradient in gradients:
        flat = gradient.reshape(-1).to(wide)
        for found, direction in zip(dots, directions, strict=True):
            found.append(torch.dot(flat, direction))
        total = flat.view(gradient.shape) if total is None else total.add_(gradient)
    assert total is not None
    return total, [(slot, torch.stack(found)) for (slot, _), found in zip(tangents, dots, strict=True)]
