# mypy: allow-untyped-calls
"""The cost of one operator: floating-point operations, and workspace that it keeps for backward."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gradsight.memory.fake_operators import grouped_flops, is_grouped_product

_known_workspaces: dict[str, int] = {}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Operations of one call; 0 for whatever is no matrix product, convolution or attention.

    >>> x = torch.ones(2, 3)
    >>> flops_of(torch.ops.aten.mm.default, (x, x.T), {}, x @ x.T)
    24
    """
    packet = getattr(func, "_overloadpacket", None)
    # torch's registry knows the attention kernels of CUDA, but not those of the CPU.
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    if is_grouped_product(func):
        return grouped_flops(args[0], args[1], args[2] if len(args) > 2 else None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=out))


def cost_per_byte(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Operations to compute a result again, per byte that keeping it takes."""
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in made)
    if size == 0:
        return 0.0
    return flops_of(func, args, kwargs, out) / size


def workspace_of(func: Any, args: tuple[Any, ...], out: Any) -> tuple[torch.Tensor, int] | None:
    """The workspace among an operator's results with its true size, where a fake run has it empty.

    That is oneDNN's LSTM. The library alone knows the size, so the layer is run once on zeros of
    the same shapes; a second time it is known.
    """
    if getattr(func, "_overloadpacket", None) is not torch.ops.aten.mkldnn_rnn_layer:
        return None
    workspace = out[3]
    if not isinstance(workspace, FakeTensor):
        return None
    key = str(tree_map(_shape_and_type, args))
    if key not in _known_workspaces:
        _known_workspaces[key] = _real_workspace_bytes(func, args)
    return workspace, _known_workspaces[key]


def _real_workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    # Gradients must be enabled: without them oneDNN runs inference and makes no workspace.
    with _disable_current_modes(), torch.enable_grad():
        workspace = func(*tree_map(_zeros, args))[3]
    if workspace is None:
        return 0
    return int(workspace.numel() * workspace.element_size())


def _shape_and_type(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.dtype


def _zeros(value: Any) -> Any:
    """A real tensor of a fake one's shape and type; other arguments are as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype)
