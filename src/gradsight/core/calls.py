"""One call of the model as it was made, and passes of ours that are no part of training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsight.core.carried import carried, carry, drop, is_carried


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """The arguments and circumstances of one call of the model: enough to make it again.

    All tensors are references, not copies.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng: Mapping[str, Tensor]
    """The states of torch's generators before the call, by device: "cpu", "cuda:0"."""
    buffers: Mapping[str, Tensor]
    """The model's buffers before the call, where the call may change them (running statistics)."""
    autocast: tuple[str, str] | None
    """Device type and dtype of the autocast the model was called under."""
    training: bool
    caller: str | None
    """File and line of the user's call of the model."""
    output_gradients: tuple[Tensor | None, ...] | None = None
    """The gradients at the output's tensors in the order of `tensors_in`; None where not kept."""
    output_nodes: tuple[Any, ...] | None = None
    """The autograd nodes (`grad_fn`) of the same tensors, while the process that made them runs."""
    backward_caller: str | None = None
    """File and line of the user's call of backward."""
    loss_root: Tensor | None = None
    """The tensor that backward was called on, while the process that made it runs."""
    loss_lines: Mapping[Any, str] | None = None
    """File and line that made the autograd nodes between the outputs and `loss_root`."""
    sample_ids: tuple[int | str, ...] | None = None


SUSPENDED = "gradsight.suspended"
"""What a thread carries while it runs a pass of ours."""


@contextmanager
def suspended() -> Iterator[None]:
    """A pass of an instrument's own: the other instruments look away in here.

    They go on looking at what other threads do meanwhile.
    """
    if is_suspended():  # passes of ours may lie in one another
        yield
        return
    try:
        carry(SUSPENDED, True)
        yield
    finally:
        if is_carried(SUSPENDED):
            drop(SUSPENDED)


def is_suspended() -> bool:
    """Whether the pass under way in this thread is an instrument's own."""
    return carried(SUSPENDED) is not None
