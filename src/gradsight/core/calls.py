"""One call of the model as it was made, and passes of ours that are no part of training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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


_suspensions = 0  # a count: passes of ours may lie in one another


@contextmanager
def suspended() -> Iterator[None]:
    """A pass of an instrument's own: the other instruments look away in here."""
    global _suspensions
    _suspensions += 1
    try:
        yield
    finally:
        _suspensions -= 1


def is_suspended() -> bool:
    """Whether the pass under way is an instrument's own."""
    return _suspensions > 0
