"""matmul and einsum with a parameter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsight.core.autocast import autocast_dtype, autocast_to
from gradsight.ghost.dots import row_dots
from gradsight.ghost.rules.linear import split_product
from gradsight.ghost.use import DECLINED, Use, rule


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(use: Use) -> Any:
    """y = x W with a matrix W on the right is a linear layer; else y is linear in the parameter."""
    if len(use.args) != 2 or use.kwargs:
        return DECLINED
    x, weight = use.args
    if weight.dim() == 2 and x.dim() >= 2 and use.source(weight) is not None:
        return split_product(use, x, weight, None, transposed=True)
    return multilinear(use)


@rule(torch.bmm, Tensor.bmm, torch.einsum)
def multilinear(use: Use) -> Any:
    """y is linear in the parameter p, so its derivative along D is the same with D in p's place."""
    equation = use.args[:1] if use.func is torch.einsum else ()
    flat = list(use.args[len(equation) :])
    if use.kwargs or not all(isinstance(t, Tensor) for t in flat):
        return DECLINED
    carried = [i for i, t in enumerate(flat) if use.source(t) is not None]
    if len(carried) != 1:
        return DECLINED
    y = use.plain()
    layout = use.layout(y.shape)
    if layout is None:
        return DECLINED
    (position,) = carried
    source = use.source(flat[position])
    assert source is not None
    others = [t for i, t in enumerate(flat) if i != position]
    dtype = flat[position].dtype
    batch = use.batch
    device = y.device.type
    mixed = autocast_dtype(device)

    def score(grad: Tensor, saved: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = []
        for slot, direction in source.tangents():
            operands = [*saved[:position], direction.to(dtype), *saved[position:]]
            with autocast_to(device, mixed):
                along = use.func(*equation, *operands)
                pairs.append((slot, row_dots(along, grad, layout, batch)))
        return pairs

    return use.attach(y, score, others)
