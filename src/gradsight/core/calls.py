"""One call of the model as it was made, and passes of ours that are no part of training."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gradsight.core.carried import carried, carry, drop, is_carried


@dataclass(frozen=True, slots=True)
class CallNumber:
    """Which call of the model it was in its step; all are counted from 0."""

    micro_batch: int
    """The calls between two backward passes belong to one micro-batch."""
    call: int = 0
    """Its place among the calls of its micro-batch."""
    calls: int = 1
    """How many calls that micro-batch had."""
    continues: bool = False
    """Whether an argument was computed from the outputs of an earlier call of the micro-batch."""

    @property
    def named_call(self) -> int | None:
        """Its place among the calls of its micro-batch, if that had more than one."""
        return self.call if self.calls > 1 else None

    def among(self, micro_batches: int) -> str:
        """Name the call in a step with so many micro-batches.

        >>> CallNumber(1).among(4), CallNumber(0, 5, 10).among(1), CallNumber(1, 5, 10).among(4)
        ('micro-batch 1', 'call 5 of 10', 'micro-batch 1, call 5 of 10')
        >>> CallNumber(0).among(1)
        'the model'
        """
        names = [f"micro-batch {self.micro_batch}"] if micro_batches > 1 else []
        if self.calls > 1:
            names.append(f"call {self.call} of {self.calls}")
        return ", ".join(names) or "the model"


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
    loss_values: Any = None
    """What autograd had saved of that loss, where it was not finite (incidents.loss_values)."""
    sample_ids: tuple[int | str, ...] | None = None
    part: str = ""
    """The module that was called, where it was a part of the model and not the model itself."""
    number: CallNumber | None = None
    """None: each call is a micro-batch of its own, in the order of the calls."""


def module_of(root: nn.Module, call: RecordedCall) -> nn.Module:
    """Return the module that was called: the model, or a part of it."""
    return root.get_submodule(call.part)


def numbered(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the calls of a step, each with its number."""
    return [
        replace(call, number=CallNumber(place)) if call.number is None else call
        for place, call in enumerate(calls)
    ]


def micro_batches(calls: Sequence[RecordedCall]) -> int:
    """Return how many micro-batches the calls of a step belong to."""
    numbers = [call.number for call in numbered(calls) if call.number is not None]
    return max((number.micro_batch for number in numbers), default=0) + 1


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
