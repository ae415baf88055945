"""The gradient and the scores of one pass that is no part of training."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradsight.ghost.directions import Direction
from gradsight.ghost.one_pass import OnePass


def joined_gradients(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    probe: Tensor,
    one_pass: OnePass | None,
) -> tuple[Direction, Tensor]:
    """The gradient of sum <cotangent, output> by parameter, and the table of scores.

    No .grad is touched and no hook of a parameter runs, which may be an optimizer's step.
    """
    leaves = [] if one_pass is None else one_pass.leaves()
    inputs = [*parameters.values(), probe, *(leaf for _, _, leaf in leaves)]
    slopes = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    own = len(parameters)
    named = zip(parameters, slopes[:own], strict=True)
    gradient = {name: slope.detach() for name, slope in named if slope is not None}
    table = torch.zeros_like(probe) if slopes[own] is None else slopes[own].detach()
    if one_pass is None:
        return gradient, table
    with torch.no_grad():  # as in the hooks of a backward pass
        for (name, number, _), slope in zip(leaves, slopes[own + 1 :], strict=True):
            one_pass.take(name, number, slope)
        one_pass.finish()
    if one_pass.table is not None:
        table = table + one_pass.table.to(table)
    return gradient, table
