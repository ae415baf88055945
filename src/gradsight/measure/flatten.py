"""The entries of a gradient as plain one-dimensional memory, whatever its layout."""

import torch
from torch import Tensor


def flat(gradient: Tensor) -> Tensor:
    """The entries of a dense, sparse or complex tensor as one dimension, in memory order, without a
    copy where possible.

    To be called without autograd.

    >>> flat(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)).shape
    torch.Size([96])
    """
    gradient = dense_real(gradient)
    if gradient.is_contiguous():
        return gradient if gradient.dim() == 1 else gradient.view(-1)
    if _fills_its_memory(gradient):
        return gradient.as_strided((gradient.numel(),), (1,))
    return gradient.reshape(-1)


def dense_real(gradient: Tensor) -> Tensor:
    """The entries of a sparse or complex tensor as real numbers; others as they are."""
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether a permutation of the dimensions makes the tensor contiguous (channels_last, a
    transposed matrix).
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
