"""Workspaces that an operator keeps for its backward and whose size only the operator knows."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

_known: dict[Any, int] = {}


def workspace_of(func: Any, args: tuple[Any, ...], out: Any) -> tuple[torch.Tensor, int] | None:
    """The workspace among an operator's results and its true size, where a fake run makes it empty:
    oneDNN's LSTM.

    The library alone knows the size, so the layer is run once on zeros of the same shapes; a second
    time it is known.
    """
    if getattr(
        func, "_overloadpacket", None
    ) is not torch.ops.aten.mkldnn_rnn_layer or not isinstance(out[3], FakeTensor):
        return None
    key = str(
        tree_map(
            lambda value: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value,
            args,
        )
    )
    if key not in _known:
        with _disable_current_modes(), torch.enable_grad():
            workspace = func(*tree_map(_zeros, args))[3]
            _known[key] = 0 if workspace is None else workspace.numel() * workspace.element_size()
    return out[3], _known[key]


def _zeros(value: Any) -> Any:
    """A real tensor of a fake one's shape and type."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
