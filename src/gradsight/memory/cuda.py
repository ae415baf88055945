"""CUDA's operators on tensors that are not there: the CPU's dropout and attention swapped.

Fake CUDA tensors are not used: on a build of torch without CUDA they abort the process. The step
runs on fake CPU tensors instead, with the operators replaced whose saved tensors differ.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CUDA = "cuda"
SIMULATED = ("cpu", CUDA)
"""Devices that a step is predicted for."""
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


def is_cuda(device: str) -> bool:
    """Whether a device type, as users give it, is CUDA's."""
    return device == CUDA


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


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of torch's scaled_dot_product_attention, in its order and with its defaults."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def takes_flash(self) -> bool:
        """Whether torch would take its flash kernel: no mask, 16-bit types, heads of up to 256."""
        half = self.query.dtype in (torch.float16, torch.bfloat16)
        return self.attn_mask is None and half and self.query.shape[-1] <= 256

    def heads_repeated(self) -> "AttentionCall":
        """The call with a key and a value for each head of the query."""
        if not self.enable_gqa:
            return self
        groups = self.query.shape[1] // self.key.shape[1]
        key = self.key.repeat_interleave(groups, 1)
        value = self.value.repeat_interleave(groups, 1)
        return replace(self, key=key, value=value)

    def bias(self) -> torch.Tensor | None:
        """The mask as the additive bias that the kernel takes, in the query's type."""
        mask = self.attn_mask
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(mask, dtype=self.query.dtype)
        else:
            bias = mask.to(self.query.dtype)
        return bias.expand(*self.query.shape[:3], self.key.shape[2])


def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """CUDA's fused attention: output and log-sum-exp are kept, never the matrix of weights."""
    call = AttentionCall(*args, **kwargs)
    if call.query.dim() != 4:  # the kernels take batch and heads as two dimensions
        return _attention(*args, **kwargs)
    call = call.heads_repeated()
    tensors = (call.query, call.key, call.value)
    made: tuple[torch.Tensor, ...]
    if call.takes_flash():
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        made = flash(*tensors, call.dropout_p, call.is_causal, False, scale=call.scale)
    else:
        efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
        made = efficient(
            *tensors, call.bias(), True, call.dropout_p, call.is_causal, scale=call.scale
        )
    return made[0]


def _autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Autocast for CUDA, on the CPU tensors that stand in for CUDA's."""
    if is_cuda(device_type):
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
        return torch.device("cpu") if is_cuda(value.type) else value
    if isinstance(value, str):
        return "cpu" if re.fullmatch(r"cuda(:\d+)?", value) else value
    return value
