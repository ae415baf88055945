"""One pass of a training step as the model saw it: enough to run it again; and passes that are no
part of training.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Pass:
    """The arguments of one call of the model, and what came back to its outputs. References, not
    copies.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng: Mapping[str, Tensor]
    """The generators' states before the call, by device: "cpu", "cuda:0"."""
    buffers: Mapping[str, Tensor]
    """The model's buffers before the call, where the call may change them (running statistics)."""
    autocast: tuple[str, str] | None
    """Device type and dtype of the autocast the model was called under."""
    training: bool
    caller: str | None
    """File and line of the user's call of the model."""
    output_gradients: tuple[Tensor | None, ...] | None = None
    """The gradients at the tensors of the output, as `rows.tensors_in(output)` lists them; None
    where they were not kept.
    """
    output_nodes: tuple[Any, ...] | None = None
    """The autograd nodes (`grad_fn`) of the same tensors, where the process that made them still
    runs.
    """
    backward_caller: str | None = None
    """File and line of the user's call of backward."""
    sample_ids: tuple[int | str, ...] | None = None


_unseen = 0


@contextmanager
def unseen() -> Iterator[None]:
    """A pass of an instrument's own: the other instruments look away."""
    global _unseen
    _unseen += 1
    try:
        yield
    finally:
        _unseen -= 1


def is_unseen() -> bool:
    """Whether the pass under way is an instrument's own."""
    return _unseen > 0
