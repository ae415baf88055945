"""Runs a pass again and pulls gradients back through it.

The model is called here and nowhere else under a watcher: see places.BOUNDARY.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.loss_graph import nodes_below
from gradsight.core.samples import tensors_in
from gradsight.errors import GradsightError


class NoGradient(GradsightError):
    """Nothing can be pulled back through this pass."""


def run_model(root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of the model's output."""
    return tensors_in(root(*args, **kwargs))


def pull(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    keep: bool = False,
) -> list[Tensor | None]:
    """The gradients at `inputs`, without a trace in any `.grad`."""
    pairs = [(y, c.to(y)) for y, c in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs or not inputs:
        raise NoGradient("no output of the model depends on a trainable parameter")
    pulled = torch.autograd.grad(
        [y for y, _ in pairs],
        inputs,
        [c for _, c in pairs],
        allow_unused=True,
        retain_graph=keep,
    )
    return list(pulled)


def trained_parameters(root: nn.Module) -> list[Tensor]:
    """The parameters that are trained, each once."""
    return [parameter for parameter in root.parameters() if parameter.requires_grad]


def are_last(outputs: Sequence[Tensor]) -> list[bool]:
    """For each output, whether no other output is computed from it.

    Gradients at the others came through the last ones, in part or all.
    """
    nodes = [y.grad_fn for y in outputs]
    inner: set[Any] = set()
    for node in nodes:
        if node is not None and node not in inner:
            inner.update(nodes_below(following for following, _ in node.next_functions))
    return [node is None or node not in inner for node in nodes]
