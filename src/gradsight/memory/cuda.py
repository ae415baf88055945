"""CUDA's operators on tensors that are not there: the CPU's dropout and attention swapped.

Fake CUDA tensors are not used: on a build of torch without CUDA they abort the process. The step
runs on fake CPU tensors instead, with the operators replaced whose saved tensors differ.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

GRANULE = 512
"""CUDA's allocator rounds every block up to this many bytes."""

UNKNOWN = (
    "not in this number: the CUDA context, fragmentation, workspaces of cuBLAS and cuDNN "
    "(often 0.5 to 1 GB in all)",
    "attention is taken as torch's flash kernel for 16-bit types without a mask, else its "
    "memory-efficient kernel",
)
"""Notes on every prediction for CUDA."""

_attention = F.scaled_dot_product_attention
_autocast_init = torch.autocast.__init__


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Inside, dropout and attention keep what CUDA's keep; tensors put on CUDA stay on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(_StayOnCpu())
        # F.dropout is what nn.Dropout calls; models written by hand call torch.dropout as well.
        for owner, name, stand_in in (
            (F, "dropout", dropout),
            (torch, "dropout", _torch_dropout),
            (F, "scaled_dot_product_attention", attention),
            (torch.autocast, "__init__", _autocast),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """CUDA's fused dropout: it keeps a boolean mask, where the CPU keeps the scaled noise."""
    if not training or p == 0:
        return input
    result = torch.native_dropout(input, p, True)[0]
    return input.copy_(result) if inplace else result


def _torch_dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return dropout(input, p, train)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """CUDA's fused attention: output and log-sum-exp are kept, never the matrix of weights."""
    if query.dim() != 4:  # the kernels take batch and heads as two dimensions
        return _attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    half = query.dtype in (torch.float16, torch.bfloat16)
    made: tuple[torch.Tensor, ...]
    # The flash kernel takes no mask, 16-bit types only, and heads of up to 256 numbers.
    if attn_mask is None and half and query.shape[-1] <= 256:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        made = flash(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
        efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
        made = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
    return made[0]


def _as_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as the additive bias that the kernel takes, in the query's type."""
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype)
    else:
        bias = mask.to(query.dtype)
    return bias.expand(*query.shape[:3], key.shape[2])


def _autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Autocast for CUDA, on the CPU tensors that stand in for CUDA's."""
    if device_type == "cuda":
        device_type = "cpu"
        # Where no type is named, CUDA's autocast takes float16 and the CPU's bfloat16.
        if not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float16
    _autocast_init(self, device_type, *args, **kwargs)


class _StayOnCpu(TorchFunctionMode):
    """Whatever is moved to CUDA or made there is on the CPU instead, where it is fake."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map(_as_cpu, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _as_cpu(value: Any) -> Any:
    """A CUDA device, as an object or as text, replaced by the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str):
        return "cpu" if re.fullmatch(r"cuda(:\d+)?", value) else value
    return value
