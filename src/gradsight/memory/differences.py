# mypy: allow-untyped-calls
"""The traces of a training step, and where two steps differ: bit for bit, and in which module."""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradsight.core.random_state import as_bytes, random_sources, source_state, torch_states
from gradsight.memory.blocks import NamedModule

SEED = 20260311


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """Loss, gradients, buffers and random states after forward and backward."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    random: Mapping[str, bytes]
    """The state of every generator: torch's, numpy's, Python's, and those that modules hold."""


@dataclass(frozen=True, slots=True)
class StepDifferences:
    """The parts of two snapshots that differ, by name, in the order of the model's definition."""

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
    if len(names) == 1:
        return ""
    return f", with {len(names) - 1} more"


def seed_everything() -> None:
    """Start every shared source of randomness at one place."""
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)


def take_snapshot(model: nn.Module, loss: torch.Tensor) -> StepSnapshot:
    """A copy of what the step left; nothing in it changes afterwards."""
    gradients: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[name] = None if gradient is None else gradient.detach().clone()
    states = {
        name: as_bytes(source_state(source)) for name, source in random_sources(model).items()
    }
    return StepSnapshot(
        loss=loss.detach().clone(),
        gradients=gradients,
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        random=states | _shared_random_states(),
    )


def _shared_random_states() -> dict[str, bytes]:
    """The states of torch's (of every device), numpy's and Python's own generators."""
    of_devices = torch_states()
    states = {
        "torch's generator": as_bytes(of_devices.pop("cpu")),
        "numpy's generator": as_bytes(np.random.get_state()),
        "Python's generator": as_bytes(random.getstate()),
    }
    for device, state in of_devices.items():
        states[f"the generator of {device}"] = as_bytes(state)
    return states


def compare_snapshots(plain: StepSnapshot, other: StepSnapshot) -> StepDifferences:
    """Everything in which the other step differs from the plain one."""
    return StepDifferences(
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
        one = one.to_dense()
        other = other.to_dense()
    # As numbers NaN would differ from itself, and minus zero would equal zero.
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    local: Any = getattr(tensor, "_local_tensor", tensor)  # of a DTensor this rank's part
    flat: torch.Tensor = local.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8)


class DivergenceFinder:
    """Compares what modules in checkpointed blocks take and give in forward and recomputation.

    torch itself compares only shapes, types and devices of recomputed tensors. A context manager
    for one forward and backward; `guilty` is then the module whose own code differed: the first one
    that gave something else for the same input, or, where the input was different already, the
    module around it.
    """

    def __init__(self, blocks: Sequence[NamedModule]) -> None:
        self.guilty: str | None = None
        self._blocks = blocks
        self._seen: dict[str, set[tuple[int, int]]] = defaultdict(set)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "DivergenceFinder":
        for block, module in self._blocks:
            for name, part in module.named_modules(prefix=block):
                if part is not module:
                    self._watch(name, part)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self._look(name, fingerprint((args, kwargs)), fingerprint(out))

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _look(self, name: str, given: int, made: int) -> None:
        """Remember the first run; in a recomputation, judge."""
        in_forward = torch._C._current_graph_task_id() == -1  # no backward is running
        if in_forward:
            self._seen[name].add((given, made))
        elif self.guilty is None and (given, made) not in self._seen[name]:
            same_input = any(given == before for before, _ in self._seen[name])
            self.guilty = name if same_input else name.rpartition(".")[0]


def fingerprint(value: Any) -> int:
    """A number for the bits of every tensor in a value."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return hash(tuple(_hash_of_bits(tensor) for tensor in tensors))


def _hash_of_bits(tensor: torch.Tensor) -> int:
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hash(plain.numpy().tobytes())
