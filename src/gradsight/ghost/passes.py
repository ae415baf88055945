"""Passes through the model beside the training pass: they leave no trace in it."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gradsight.core import samples as rows
from gradsight.core.calls import suspended
from gradsight.core.samples import ModelCall, NotSeparable, tensors_in
from gradsight.errors import GradsightError

__all__ = ["ModelCall", "aside", "eager", "is_compiled", "tell_batch", "tensors_in"]


@contextmanager
def aside(root: nn.Module) -> Iterator[None]:
    """Evaluation mode, with gradients, the modules' modes and the random generators restored
    afterwards.
    """
    modes = [(module, module.training) for module in root.modules()]
    devices = {p.device for p in root.parameters() if p.device.type == "cuda"}
    with suspended(), torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training


def is_compiled(root: nn.Module) -> bool:
    """Whether the model or a part of it is compiled."""
    return any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
        for m in root.modules()
    )


@contextmanager
def eager() -> Iterator[None]:
    """Compiled code runs uncompiled in here, so that its operations can be seen."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def tell_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: int | None,
    batch_dim: int | None,
    root: nn.Module,
) -> ModelCall:
    """Find the samples in the arguments of a call of the model; where they cannot be told, say what
    the user can do.
    """
    try:
        return rows.tell_batch(args, kwargs, size, batch_dim, root)
    except NotSeparable as error:
        raise GradsightError(
            f"{error} Check sample_ids, or pass batch_dim to GhostEngine."
        ) from None
