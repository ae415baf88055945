"""Gradients taken beside training: no .grad is touched, whatever the model is wrapped in."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradsight.core.shards import local_part


def gradients(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None,
    parameters: Mapping[str, Tensor],
    sharded: bool,
    extra: Tensor | None = None,
    keep_graph: bool = False,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The gradient of sum <cotangent, output> by parameter name, and that of one more tensor.

    Of a sharded model they are the mean over the processes.
    """
    wanted = list(parameters.values())
    if not sharded:
        inputs = wanted if extra is None else [*wanted, extra]
        slopes = torch.autograd.grad(
            outputs, inputs, cotangents, allow_unused=True, retain_graph=keep_graph
        )
        named = {n: dense(g) for n, g in zip(parameters, slopes, strict=False) if g is not None}
        return named, slopes[-1] if extra is not None else None
    # fully_shard reduces gradients in hooks that only a full backward pass runs, so .grad is set
    # aside meanwhile.
    kept = [p.grad for p in wanted]
    try:
        for p in wanted:
            p.grad = None
        torch.autograd.backward(list(outputs), None if cotangents is None else list(cotangents))
        named = {n: dense(p.grad) for n, p in parameters.items() if p.grad is not None}
    finally:
        for p, grad in zip(wanted, kept, strict=True):
            p.grad = grad
    return named, None if extra is None else extra.grad


def dense(gradient: Tensor) -> Tensor:
    """A gradient cut off from its graph; that of a sparse embedding with its zeros."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of this process's parts, in fp32 or wider; of complex numbers the real part."""
    x, y = _real_vector(a), _real_vector(b)
    wide = torch.promote_types(torch.float32, torch.promote_types(x.dtype, y.dtype))
    return torch.dot(x.to(wide), y.to(wide))


def _real_vector(tensor: Tensor) -> Tensor:
    values = dense(local_part(tensor))
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(
        -1
    )
