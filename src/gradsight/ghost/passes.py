"""Passes through the model beside the training pass: they leave no trace in it."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradsight.errors import GradsightError
from gradsight.ghost.layout import Layout


@contextmanager
def aside(root: nn.Module) -> Iterator[None]:
    """Evaluation mode, with gradients, the modules' modes and the random generators restored afterwards."""
    modes = [(module, module.training) for module in root.modules()]
    devices = {p.device for p in root.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training


def is_compiled(root: nn.Module) -> bool:
    """Whether the model or a part of it is compiled."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in root.modules())


@contextmanager
def eager() -> Iterator[None]:
    """Compiled code runs uncompiled in here, so that its operations can be seen."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of an output, also those inside objects that torch does not know how to open."""
    leaves, _ = tree_flatten(value)
    found: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += [item for item in vars(leaf).values() if isinstance(item, Tensor)]
    return found


@dataclass
class ModelCall:
    """One call of the model: its arguments, and where the samples are in them."""

    flat: list[Any]
    spec: Any
    layouts: Mapping[int, Layout]
    batch: int

    def whole(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they came."""
        args, kwargs = tree_unflatten(self.flat, self.spec)
        return args, kwargs

    def row(self, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with sample i alone."""
        flat = list(self.flat)
        for position, layout in self.layouts.items():
            size = flat[position].shape[layout.dim] // self.batch
            flat[position] = flat[position].narrow(layout.dim, i * size, size)
        args, kwargs = tree_unflatten(flat, self.spec)
        return args, kwargs


def tell_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], size: int | None, batch_dim: int | None, root: nn.Module
) -> ModelCall:
    """Find the samples in the arguments of a call of the model.

    The number of samples is that of the sample_ids where given; else that of dimension `batch_dim`, by default 0, or 1 where
    the model says batch_first=False or only dimension 1 is the same in all tensors.
    """
    flat, spec = tree_flatten((tuple(args), dict(kwargs)))
    tensors = {i: x for i, x in enumerate(flat) if isinstance(x, Tensor) and x.dim() > 0}
    if not tensors:
        raise GradsightError(
            f"the size of the batch cannot be told: {type(root).__name__} was called without a tensor of at least one "
            "dimension. Call the model with tensors, or pass sample_ids to observe()."
        )
    dim = batch_dim if batch_dim is not None else _likely_dim(root, list(tensors.values()), size)
    first = next(iter(tensors.values()))
    batch = size if size is not None else first.shape[min(dim, first.dim() - 1)]
    layouts = {i: Layout(d) for i, x in tensors.items() if (d := _find_dim(x, batch, dim)) is not None}
    if not layouts:
        layouts = {i: Layout(0, "major") for i, x in tensors.items() if batch > 0 and x.shape[0] % batch == 0}
    if not layouts or batch == 0:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors.values())
        raise GradsightError(
            f"the size of the batch cannot be told: expected {batch} samples in the tensors that the model was called with, "
            f"got the shapes {shapes}. Check sample_ids, or pass batch_dim to GhostEngine."
        )
    return ModelCall(flat, spec, layouts, batch)


def _likely_dim(root: nn.Module, tensors: Sequence[Tensor], size: int | None) -> int:
    if getattr(root, "batch_first", True) is False:
        return 1
    by_dim = [{t.shape[d] for t in tensors if t.dim() > d and t.shape[d] != 1} for d in (0, 1)]
    if size is not None:
        return 0 if size in by_dim[0] or size == 1 or size not in by_dim[1] else 1
    return 1 if len(by_dim[0]) > 1 and len(by_dim[1]) == 1 and all(t.dim() > 1 for t in tensors) else 0


def _find_dim(tensor: Tensor, batch: int, preferred: int) -> int | None:
    for dim in (preferred, 0, 1):
        if dim < tensor.dim() and tensor.shape[dim] == batch:
            return dim
    return None
