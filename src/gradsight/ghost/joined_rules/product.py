# mypy: allow-untyped-calls
"""Linear layers in one pass, y = x W^T + b and Hugging Face's y = b + x W; and convolutions.

A convolution has calls of its own for the rows of training and of each target: each row is made
once, as in plain training, and the training rows once more with the direction.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.core.autocast import autocast_dtype
from gradsight.ghost.directions import Tangents
from gradsight.ghost.dots import in_wide, same_type, score_table
from gradsight.ghost.fallback import once_differentiable
from gradsight.ghost.joined_operations import run_sliced
from gradsight.ghost.joined_rules.embedding import Owed, owed_by_head
from gradsight.ghost.one_pass import OnePass, Pairs
from gradsight.ghost.routes import balance_of, choose
from gradsight.ghost.rules.linear import bias_sums, plain_product, sum_and_dots_of_products
from gradsight.ghost.sample_axis import LEADING, SampleLayout
from gradsight.ghost.scratch import Scratch
from gradsight.ghost.tangent_sources import TangentSource
from gradsight.ghost.use import DECLINED, Use, joined_rule


@joined_rule(F.linear)
def joined_linear(use: Use) -> Any:
    """y = x W^T + b: the direction is B_v^T A_v, score_i = <B_i^T A_i, direction>."""
    x, weight, bias = use.argument(0, "input"), use.argument(1, "weight"), use.argument(2, "bias")
    if weight.dim() != 2 or x.dim() < 2:
        return DECLINED
    return joined_product(use, x, weight, bias, transposed=False)


@joined_rule(torch.addmm)
def joined_addmm(use: Use) -> Any:
    """y = b + x W with W as [inputs, outputs]."""
    bias, x, weight = use.argument(0, "input"), use.argument(1, "mat1"), use.argument(2, "mat2")
    if len(use.args) != 3 or use.kwargs or bias.dim() != 1:
        return DECLINED
    return joined_product(use, x, weight, bias, transposed=True)


@joined_rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def joined_matmul(use: Use) -> Any:
    """y = x W with a matrix W on the right."""
    if len(use.args) != 2 or use.kwargs:
        return DECLINED
    x, weight = use.args
    if weight.dim() != 2 or x.dim() < 2 or use.source(weight) is None:
        return DECLINED
    return joined_product(use, x, weight, None, transposed=True)


def joined_product(
    use: Use, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Any:
    """The product over all rows, its parameters' gradients split by rows."""
    if use.source(x) is not None:
        return DECLINED
    layout = use.layout(x.shape[:-1])
    if layout is None:
        return DECLINED
    split = JoinedSplit(
        use.one_pass,
        layout,
        (use.source(weight), use.source(bias)),
        transposed,
        autocast_dtype(x.device.type),
        use.scratch,
        use.route,
    )
    stand_ins = [*use.stand_ins(weight), *use.stand_ins(bias)]
    return JoinedProduct.apply(x, weight, bias, use.probe, split, *stand_ins)


@dataclass(slots=True)
class JoinedSplit:
    """How a product over joined rows is split."""

    one_pass: OnePass
    layout: SampleLayout
    sources: tuple[TangentSource | None, TangentSource | None]
    """Of the weight and of the bias."""
    transposed: bool
    """Whether the weight is [inputs, outputs]."""
    dtype: torch.dtype | None
    """Automatic mixed precision's, where that is on."""
    scratch: Scratch
    route: str | None


@dataclass(slots=True)
class ParameterPart:
    """What one use gives a parameter."""

    gradient: Tensor | None = None
    """That of the training rows."""
    targets: list[Tensor] | None = None
    """Those of the targets' rows, where they go to the parameter's stand-ins."""

    def for_stand_ins(self, source: TangentSource | None, number: int) -> list[Tensor | None]:
        """The stand-ins' gradients: as many as the use was given."""
        if source is None:
            return []
        return list(self.targets) if self.targets is not None else [None] * number


class JoinedProduct(torch.autograd.Function):
    """A product of all rows, its weight gradient made of the training rows' alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        probe: Tensor,
        split: JoinedSplit,
        *stand_ins: Tensor,
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
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return plain_product(x, weight, bias, split.transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Input, weight and bias gradient, the scores as the probe's, and the stand-ins' parts."""
        x, weight = ctx.saved_tensors
        split = ctx.split
        one_pass = split.one_pass
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        rows = split.layout.matrices(grad, one_pass.parts.total)
        weight_part = ParameterPart()
        bias_part = ParameterPart()
        pairs: Pairs = []
        if need_bias:
            sums = bias_sums(rows)
            found = one_pass.from_sums(split.sources[1], sums, sums.shape[1:])
            bias_part = ParameterPart(*found[:2])
            pairs += found[2]
        if need_weight:
            inputs = split.layout.matrices(x, one_pass.parts.total)
            left, right = (inputs, rows) if split.transposed else (rows, inputs)
            weight_part, scores = weight_gradient(split, left, right, weight.shape)
            pairs += scores
        dx = None
        if need_x:
            dx = F.linear(grad, weight) if split.transposed else grad.matmul(weight)
        number = len(one_pass.targets)
        stand_ins = weight_part.for_stand_ins(split.sources[0], number)
        stand_ins += bias_part.for_stand_ins(split.sources[1], number)
        table = score_table(pairs, ctx.probe) if pairs else None
        return dx, weight_part.gradient, bias_part.gradient, table, None, *stand_ins


def weight_gradient(
    split: JoinedSplit, left: Tensor, right: Tensor, shape: torch.Size
) -> tuple[ParameterPart, Pairs]:
    """The gradient left^T right of the training rows, the targets' parts or the scores."""
    one_pass = split.one_pass
    parts = one_pass.parts
    source = split.sources[0]
    training = parts.of_training(left), parts.of_training(right)
    if source is None:
        return ParameterPart(product_of(*training).view(shape)), []
    numbers = range(len(parts.targets))
    targets = [(parts.of_target(left, n), parts.of_target(right, n)) for n in numbers]
    if one_pass.is_single(source):
        directions = [product_of(*each).view(shape) for each in targets]
        gradient, pairs = along(split, training, one_pass.tangents(source, directions), shape)
        return ParameterPart(gradient), pairs
    owed = None
    if not split.transposed:
        owed = owed_by_head(one_pass, source, *training)
    if owed is not None:
        return _of_tied_head(split, owed, training, targets)
    # A use among others: what its scores need is kept until the whole direction is known.
    one_pass.wait(source.origins, partial(projected, *training, source))
    made = [product_of(*each).view(shape) for each in targets]
    return ParameterPart(product_of(*training).view(shape), made), []


def _of_tied_head(
    split: JoinedSplit,
    owed: Owed,
    training: tuple[Tensor, Tensor],
    targets: list[tuple[Tensor, Tensor]],
) -> tuple[ParameterPart, Pairs]:
    """A head tied to an embedding: its own part now, the rest where the embedding has its turn."""
    source = split.sources[0]
    assert source is not None
    shape = torch.Size((training[0].shape[2], training[1].shape[2]))
    owed.directions = [product_of(*each) for each in targets]
    tangents = split.one_pass.tangents(source, owed.directions)
    gradient, pairs = along(split, training, tangents, shape)
    return ParameterPart(gradient), pairs


def product_of(left: Tensor, right: Tensor) -> Tensor:
    """The sum over samples and positions of left^T right, in fp32 or wider."""
    a = left.reshape(-1, left.shape[-1])
    b = right.reshape(-1, right.shape[-1])
    return in_wide(a.t().mm(b))


def along(
    split: JoinedSplit, training: tuple[Tensor, Tensor], tangents: Tangents, shape: torch.Size
) -> tuple[Tensor, Pairs]:
    """The training rows' gradient and each one's dot with the directions, on the cheaper route."""
    left, right = training
    route = split.route
    if route is None:
        balance = balance_of(left.device.type, left.dtype)
        length = left.shape[1]
        route = choose(length, right.shape[2], left.shape[2], len(tangents), balance)
    if route == "materialise":
        return sum_and_dots_of_products(left, right, split.scratch, shape, tangents)
    return product_of(left, right).view(shape), projections(left, right, tangents)


def projections(left: Tensor, right: Tensor, tangents: Tangents) -> Pairs:
    """<left_i, right_i D^T> of every sample: the gradient's dot with D without the gradient."""
    pairs = []
    for slot, direction in tangents:
        shown = torch.matmul(right, same_type(direction, right).t())
        pairs.append((slot, in_wide(shown).mul_(left).sum((1, 2))))
    return pairs


def projected(left: Tensor, right: Tensor, source: TangentSource) -> Pairs:
    """The scores of one use along the whole direction, once that is known."""
    return projections(left, right, source.tangents())


@joined_rule(F.conv1d, F.conv2d, F.conv3d)
def joined_convolution(use: Use) -> Any:
    """y = x * W + b, the samples being the images of dimension 0."""
    if not use.args:
        return DECLINED
    x, weight = use.args[0], use.argument(1, "weight")
    if use.source(x) is not None or x.dim() != weight.dim():
        return DECLINED
    layout = use.layout(x.shape[:1])
    if layout is None or layout.kind not in LEADING:
        return DECLINED
    return run_sliced(use.one_pass, use.joined_call(), {0: layout})
