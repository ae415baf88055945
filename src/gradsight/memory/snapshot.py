# mypy: allow-untyped-calls
"""Everything a training step leaves behind, and the first thing in which two steps differ, bit for
bit.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from gradsight.core.random_state import as_bytes, random_sources, source_state, torch_states

SEED = 20260311


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Loss, gradients, buffers and random states after forward and backward."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    random: Mapping[str, bytes]
    """The state of every source of randomness: torch, CUDA, numpy, Python, and those that modules
    hold.
    """


@dataclass(frozen=True, slots=True)
class Differences:
    """What is not the same in two snapshots; the names are in the order of the model's definition."""

    loss: bool
    gradients: tuple[str, ...]
    buffers: tuple[str, ...]
    random: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.loss or self.gradients or self.buffers or self.random)

    def first(self) -> str:
        """The first of them, in words."""
        if self.loss:
            return "the loss differs"
        if self.gradients:
            return f"the gradient of {self.gradients[0]} differs" + _and_more(self.gradients)
        if self.buffers:
            return f"the buffer {self.buffers[0]} differs" + _and_more(self.buffers)
        return f"the state of {self.random[0]} differs"


def _and_more(names: tuple[str, ...]) -> str:
    return f", with {len(names) - 1} more" if len(names) > 1 else ""


def seed_everything() -> None:
    """Start every shared source of randomness at one place."""
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)


def take(model: nn.Module, loss: torch.Tensor) -> Snapshot:
    """A copy of what the step left; nothing in it changes afterwards."""
    return Snapshot(
        loss=loss.detach().clone(),
        gradients={
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in model.named_parameters()
        },
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        random={
            name: as_bytes(source_state(source)) for name, source in random_sources(model).items()
        }
        | shared_random(),
    )


def shared_random() -> dict[str, bytes]:
    """The states of torch's, CUDA's, numpy's and Python's own generators."""
    of_devices = torch_states()
    states = {
        "torch's generator": as_bytes(of_devices.pop("cpu")),
        "numpy's generator": as_bytes(np.random.get_state()),
        "Python's generator": as_bytes(random.getstate()),
    }
    for device, state in of_devices.items():
        states[f"CUDA's generator {device.removeprefix('cuda:')}"] = as_bytes(state)
    return states


def compare(plain: Snapshot, other: Snapshot) -> Differences:
    """Everything in which the other step differs from the plain one."""
    return Differences(
        loss=not identical(plain.loss, other.loss),
        gradients=tuple(_differing(plain.gradients, other.gradients)),
        buffers=tuple(_differing(plain.buffers, other.buffers)),
        random=tuple(name for name in plain.random if plain.random[name] != other.random.get(name)),
    )


def _differing(
    plain: Mapping[str, torch.Tensor | None], other: Mapping[str, torch.Tensor | None]
) -> Iterator[str]:
    for name in [*plain, *(name for name in other if name not in plain)]:
        if not identical(plain.get(name), other.get(name)):
            yield name


def identical(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are the same bit for bit; NaN equals NaN of the same bits.

    >>> nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    >>> identical(nan, nan.clone()), identical(zero, -zero)
    (True, False)
    """
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    local: Any = getattr(tensor, "_local_tensor", tensor)
    flat: torch.Tensor = local.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8)
