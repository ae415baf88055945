"""A tensor in a few numbers."""

import torch
from torch import Tensor

from gradsight.core.layouts import entries
from gradsight.values.diagnoses import TensorSummary


def nonfinite_in(tensor: Tensor) -> str:
    """ "nan" if there is one, else "inf" if there is one, else "".

    >>> nonfinite_in(torch.tensor([1.0, float("-inf")])), nonfinite_in(torch.tensor([1, 2]))
    ('inf', '')
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return ""
    values = _comparable(tensor)
    if not values.numel():
        return ""
    low, high = torch.stack(torch.aminmax(values)).tolist()
    if low != low or high != high:
        return "nan"
    return "inf" if max(abs(low), abs(high)) == float("inf") else ""


def summary(tensor: Tensor) -> TensorSummary:
    """Shape, type, range of the finite values, and how many are not.

    >>> summary(torch.tensor([1.0, float("nan"), -2.0]))
    TensorSummary(shape=(3,), dtype='float32', smallest=-2.0, largest=1.0, nan=1, inf=0)
    """
    values = _comparable(tensor)
    nan = values.isnan()
    inf = values.isinf()
    finite = values[~(nan | inf)]
    limits: list[float] = []
    if finite.numel():
        limits = [float(limit) for limit in torch.aminmax(finite)]
    return TensorSummary(
        # The samples of a nested tensor have several shapes: its entries have one.
        shape=tuple(values.shape if tensor.is_nested else tensor.shape),
        dtype=dtype_name(tensor.dtype),
        smallest=limits[0] if limits else None,
        largest=limits[1] if limits else None,
        nan=int(nan.sum()),
        inf=int(inf.sum()),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The type without torch's name before it."""
    return str(dtype).removeprefix("torch.")


def _comparable(tensor: Tensor) -> Tensor:
    """Its values as real numbers of a type that can be compared."""
    values = entries(tensor)
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.is_floating_point() and values.element_size() == 1:
        return values.float()  # torch has no aminmax for types of 8 bits
    return values
