"""A real training step of what a build function returns, for predictions to be compared with."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradsight import apply_checkpointing, measure_peak_memory

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def model_and_backward(built: tuple[Any, ...]) -> tuple[Any, Callable[[], None]]:
    """Return the model of (model, batch) or (model, batch, loss_fn), and its two passes."""
    model, batch, *loss_fn = built
    model.train()

    def loss() -> Any:
        if loss_fn:
            return loss_fn[0](model, batch)
        out = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        return getattr(out, "loss", out)

    # The model's other outputs must be free before the backward pass begins.
    return model, lambda: loss().backward()


def step_of(
    built: tuple[Any, ...], policy: str | None = None, optimizer: str | None = "adamw"
) -> Callable[[], None]:
    """Return a training step that finds the optimizer's state in place, as all but the first do."""
    model, backward = model_and_backward(built)
    if policy is not None:
        apply_checkpointing(model, policy)
    if optimizer is None:
        return backward
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = OPTIMIZERS[optimizer](trainable, lr=0.0)
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    made.zero_grad()

    def step() -> None:
        backward()
        made.step()

    return step


def measured(
    build: Callable[[], Any], policy: str | None = None, optimizer: str | None = "adamw"
) -> int:
    """Return the peak of a training step."""
    return measure_peak_memory(step_of(build(), policy, optimizer)).peak_bytes
