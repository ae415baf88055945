"""The slow twin of the count: the allocator's own peak, from the profiler's memory events.

An operator may allocate and free inside itself, and how much depends on the processor: oneDNN's
convolutions and 16-bit products take scratch where it has fast instructions for them, and none
elsewhere. So two peaks are told apart: everything, and what is alive while no operator runs. The
second one is the tensors alone, the same on every machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

OPERATOR = "gradsight: an operator"


@dataclass(frozen=True, slots=True)
class AllocatorPeak:
    """How far CPU memory rose above its level at the start."""

    everything: int
    """The highest rise, operators' own scratch included."""
    between_operators: int
    """The highest rise while no operator ran, of those that ran under OperatorMarks."""
    left: int = 0
    """The rise at the end. More than what is alive: another thread freed, and that is not
    recorded, so the peaks may be too high."""

    @property
    def inside_operators(self) -> int:
        """What operators took inside themselves, on top of all that was alive outside of them."""
        return self.everything - self.between_operators


@dataclass(frozen=True, slots=True)
class _Event:
    """A change in the profiler's record."""

    time: int
    bytes: int = 0
    operators: int = 0
    """1 where an operator starts, -1 where it has returned."""


def allocator_peak(fn: Callable[[], Any]) -> AllocatorPeak:
    """Run fn once under the profiler and give the allocator's peaks."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True) as profiler:
        fn()
    results: Any = profiler.profiler.kineto_results
    level = running = everything = between_operators = 0
    for event in sorted(_events(results.events()), key=lambda event: event.time):
        level += event.bytes
        running += event.operators
        everything = max(everything, level)
        if running == 0:
            between_operators = max(between_operators, level)
    return AllocatorPeak(everything, between_operators, level)


def _events(recorded: list[Any]) -> Iterator[_Event]:
    for event in recorded:
        if event.name() == "[memory]":
            yield _Event(event.start_ns(), bytes=event.nbytes())
        elif event.name() == OPERATOR:
            yield _Event(event.start_ns(), operators=1)
            yield _Event(event.end_ns(), operators=-1)


class OperatorMarks(TorchDispatchMode):
    """Marks in the profiler's record when an operator starts and when it has returned.

    The profiler's own events do not tell: it records a composite operator and the kernels below it
    alike, and tensors that live on are made inside of both. Entered by the caller and not by
    `allocator_peak`, because compiled code runs eagerly under any dispatch mode.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper unwraps itself first; its parts come back here
        with record_function(OPERATOR):
            return func(*args, **(kwargs or {}))
