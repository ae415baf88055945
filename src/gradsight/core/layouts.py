"""Tensors that are no single block of memory: sparse, nested, quantized and MKL-DNN ones."""

from collections.abc import Iterable

import torch
from torch import Tensor

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED = (*_COMPRESSED_ROWS, torch.sparse_csc, torch.sparse_bsc)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one block of memory with strides, as most are."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def entries(tensor: Tensor) -> Tensor:
    """Return the entries that a tensor stores, as a plain tensor without gradient.

    >>> entries(torch.eye(2).to_sparse())
    tensor([1., 1.])
    """
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in _COMPRESSED or tensor.is_nested:
        return tensor.values()
    if tensor.is_quantized:
        return tensor.int_repr()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def indices(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that say where the stored entries of a sparse tensor are."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices()]
    if tensor.layout in _COMPRESSED_ROWS:
        return [tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in _COMPRESSED:
        return [tensor.ccol_indices(), tensor.row_indices()]
    return []


def is_in_memory(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor is still allocated.

    Reading freed memory crashes the process. FSDP frees unsharded parameters after use, although
    autograd still has them saved.

    >>> weight = torch.ones(2, 3)
    >>> column = weight[:, 2]
    >>> is_in_memory(column)
    True
    >>> _ = weight.untyped_storage().resize_(0)
    >>> is_in_memory(column)
    False
    """
    if not is_plain(tensor) or not tensor.numel():
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how much memory these tensors take.

    >>> held_bytes([torch.eye(2)]), held_bytes([torch.eye(2).to_sparse()])
    (16, 40)
    """
    held = 0
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:  # the only layout for which torch has no nbytes
            held += tensor._indices().nbytes + tensor._values().nbytes
        else:
            held += tensor.nbytes
    return held


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the version counters of tensors; one made in inference mode has none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
