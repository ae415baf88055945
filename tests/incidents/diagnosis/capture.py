"""Passes of a step, caught by hooks: what the flight recorder does, in its plainest form."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.calls import RecordedCall
from gradsight.core.samples import tensors_in


def line_of(marker: str, file: str) -> str:
    """File and line of the source that carries a marker comment."""
    lines = Path(file).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {marker}")]
    return f"{file}:{number}"


def user_frame() -> str:
    """File and line of the innermost frame outside torch, this file apart."""
    frame: Any = sys._getframe()
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def captured(
    model: nn.Module, ids: list[tuple[Any, ...]] | None = None
) -> Iterator[list[RecordedCall]]:
    """Every call of the model in here, with the gradients that come back to its outputs."""
    passes: list[RecordedCall] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        device = torch.is_autocast_enabled("cpu")
        passes.append(
            RecordedCall(
                args=args,
                kwargs=kwargs,
                rng={"cpu": torch.get_rng_state()},
                buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
                autocast=("cpu", str(torch.get_autocast_dtype("cpu"))) if device else None,
                training=model.training,
                caller=user_frame(),
                sample_ids=ids[len(passes)] if ids else None,
            )
        )

    def after(module: nn.Module, args: Any, output: Any) -> None:
        one, found = passes[-1], tensors_in(output)
        gradients: list[Tensor | None] = [None] * len(found)
        passes[-1] = replace(
            one,
            output_nodes=tuple(y.grad_fn for y in found),
            output_gradients=gradients,  # type: ignore[arg-type]  # filled while backward runs
        )
        for position, y in enumerate(found):
            if y.requires_grad:
                y.register_hook(
                    lambda g, p=position, to=gradients: to.__setitem__(p, g.detach().clone())
                )

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    ]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def step(
    model: nn.Module, batches: list[Any], loss_of: Callable[[nn.Module, Any], Tensor]
) -> tuple[list[RecordedCall], Tensor]:
    """Forward and backward over micro-batches; their passes and the last loss."""
    with captured(model) as passes:
        for batch in batches:
            loss = loss_of(model, batch)
            loss = loss / len(batches) if len(batches) > 1 else loss
            loss.backward()
    return passes, loss
