# mypy: allow-untyped-calls
"""A training step as a value: the user's build function called and checked, its loss and optimizer
put together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradsight.errors import GradsightError, UsageError

Build = Callable[[], Any]
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
EXPECTED = "build() must return (model, batch) or (model, batch, loss_fn)"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, a batch, and how a loss comes of them."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]

    def loss(self) -> torch.Tensor:
        """The scalar loss of the batch."""
        loss = self.loss_fn(self.model, self.batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise UsageError(
                f"the loss must be a tensor with one element, got {found}: return (model, batch, loss_fn) from build()"
            )
        return loss


def call_build(build: Build) -> Workload:
    """Call the user's build function and refuse whatever is not a model with its batch."""
    if not callable(build):
        raise UsageError(
            f"build must be a function without arguments, got {type(build).__name__}; {EXPECTED}"
        )
    try:
        built = build()
    except GradsightError:
        raise
    except Exception as error:
        raise GradsightError(
            f"build() raised {type(error).__name__}: {error}. Call it by itself first; {EXPECTED}"
        ) from error
    return as_workload(built)


def as_workload(built: Any) -> Workload:
    """What a build function returned, checked."""
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        found = f"a tuple of {len(built)}" if isinstance(built, tuple) else type(built).__name__
        raise UsageError(f"{EXPECTED}, got {found}")
    model, batch, *rest = built
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{EXPECTED}: the first must be a torch.nn.Module, got {type(model).__name__}"
        )
    if rest and not callable(rest[0]):
        raise UsageError(
            f"{EXPECTED}: loss_fn must be a function (model, batch) -> loss, got {type(rest[0]).__name__}"
        )
    if not rest and not isinstance(batch, Mapping | tuple | list | torch.Tensor):
        raise UsageError(
            f"{EXPECTED}: without loss_fn the batch is a dict or tuple of arguments, got {type(batch).__name__}"
        )
    model.train()
    return Workload(model, batch, rest[0] if rest else model_loss)


def model_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss a model gives by itself: its output's .loss, its first element, or the output."""
    if isinstance(batch, torch.Tensor):
        out = model(batch)
    else:
        out = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    if isinstance(loss := getattr(out, "loss", None), torch.Tensor):
        return loss
    first = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(first, torch.Tensor):
        raise UsageError(
            f"the model returned {type(out).__name__} without a loss: return (model, batch, loss_fn) from build()"
        )
    return first


def make_optimizer(
    optimizer: str | None, model: nn.Module, *, device: str = "cpu"
) -> torch.optim.Optimizer | None:
    """The named optimizer over the trainable parameters, in the form that torch takes by default on
    the device.
    """
    if optimizer is None:
        return None
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}, or None for none"
        )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UsageError(
            "the model has no trainable parameters: there is nothing to train, and no backward pass to save memory in"
        )
    return OPTIMIZERS[optimizer](trainable, foreach=True if device == "cuda" else None, lr=0.0)  # type: ignore[call-arg]


def warm_up(optimizer: torch.optim.Optimizer | None) -> None:
    """Make the optimizer's state, as every step but the first finds it: one step of rate 0 on zero
    gradients.
    """
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def backward(workload: Workload) -> torch.Tensor:
    """Forward and backward; the loss, without its graph."""
    loss = workload.loss()
    loss.backward()
    return loss.detach()
