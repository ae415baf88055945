"""Find the loss that made a script fail, in the local variables on the call stack.

Many scripts test their loss before backward, and end if it is NaN. Gradsight does not see such a
loss during training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from gradsight.core.layouts import is_plain
from gradsight.core.loss_graph import nodes_below
from gradsight.core.source import owner_of
from gradsight.incidents.diagnosis.numbers import nonfinite_in, summary
from gradsight.values.wording import summarized

_MOST_FRAMES = 100
_MOST_VARIABLES = 10_000
_MOST_NODES = 100_000
_MOST_ENTRIES = 10**7
"""The largest number of tensor entries to read from other variables of the function."""
_MOST_NAMED = 3

Running = tuple[FrameType, int]
"""A function that was running, and its line."""


@dataclass(frozen=True, slots=True)
class BrokenLoss:
    """A variable with a loss that is not finite."""

    name: str
    loss: Tensor
    state: str
    place: str
    inputs: tuple[str, ...]
    """Descriptions of other variables of the same function that contain NaN, such as labels."""


def running(where: BaseException | FrameType) -> list[Running]:
    """Return the functions on the call stack of an exception or a frame, innermost first."""
    found: list[Running] = []
    if isinstance(where, BaseException):
        trace = where.__traceback__
        while trace is not None:
            found.insert(0, (trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        return found
    frame: FrameType | None = where
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found


def broken_loss(frames: Sequence[Running], parameters: Sequence[Tensor]) -> BrokenLoss | None:
    """Return the newest non-finite loss of these parameters; None if there is none.

    A non-finite loss in the graph of a finite one does not count: the script handled it.
    """
    trained = set(map(id, parameters))
    for frame, line in frames[:_MOST_FRAMES]:
        file = frame.f_code.co_filename
        if owner_of(file) not in ("user", "library"):
            continue
        losses = [(name, loss) for name, loss in _numbers_of(frame) if _trains(loss, trained)]
        losses.sort(key=lambda each: -each[1].grad_fn._sequence_nr())  # type: ignore[union-attr]
        states = [nonfinite_in(loss) for _, loss in losses]
        healed: set[Any] = set()
        for (_, loss), state in zip(losses, states, strict=True):
            if not state:
                healed.update(nodes_below([loss.grad_fn], _MOST_NODES))
        for (name, loss), state in zip(losses, states, strict=True):
            if state and loss.grad_fn not in healed:
                inputs = tuple(_broken_inputs(frame))
                return BrokenLoss(name, loss, state, f"{file}:{line}", inputs)
    return None


def _numbers_of(frame: FrameType) -> Iterator[tuple[str, Tensor]]:
    """Yield the local variables that hold a differentiable scalar, such as a loss."""
    for name, value in list(frame.f_locals.items())[:_MOST_VARIABLES]:
        if (
            type(value) is Tensor
            and value.grad_fn is not None
            and is_plain(value)
            and value.is_floating_point()
            and value.numel() == 1
        ):
            yield name, value


def _broken_inputs(frame: FrameType) -> Iterator[str]:
    """Yield descriptions of the first local variables whose data contains NaN."""
    entries = named = 0
    for name, value in list(frame.f_locals.items())[:_MOST_VARIABLES]:
        # A mask is infinite on purpose: only NaN counts.
        if type(value) is not Tensor or value.requires_grad or value.device.type != "cpu":
            continue
        if not is_plain(value) or value.numel() < 2 or name.startswith("_"):
            continue
        entries += value.numel()
        if entries > _MOST_ENTRIES or named == _MOST_NAMED:
            return
        if nonfinite_in(value) == "nan":
            named += 1
            yield f"`{name}` ({summarized(summary(value))})"


def _trains(loss: Tensor, trained: set[int]) -> bool:
    """Whether a gradient of this tensor would reach one of these parameters."""
    return any(
        node.name().endswith("AccumulateGrad") and id(node.variable) in trained
        for node in nodes_below([loss.grad_fn], _MOST_NODES)
    )
