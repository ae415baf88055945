# mypy: allow-untyped-calls
"""A model's blocks, weighed on fake tensors in one mode after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradsight.memory.apply import CheckpointingHandle
from gradsight.memory.blocks import Named, find_blocks
from gradsight.memory.choose import Option, Problem
from gradsight.memory.counter import StorageCounter
from gradsight.memory.policy import NONE, Mode
from gradsight.memory.selective import cost_per_byte, is_expensive
from gradsight.memory.workload import Workload, backward, make_optimizer, warm_up

MAX_LEVELS = 4


@dataclass(slots=True)
class Marks:
    """When a block's forward started and ended and its backward started, on the counter's clock."""

    started: int = 0
    ended: int = 0
    returned: int = 0
    flops: int = 0
    """Operations run until its backward started."""
    calls: int = 0


@dataclass(slots=True)
class Trial:
    """One fake step in one choice of modes."""

    peak: int
    flops: int
    counter: StorageCounter
    marks: list[Marks] = field(default_factory=list)


class Bench:
    """A model that runs its step again and again, each time in other modes. Use it under
    fake_tensors().
    """

    def __init__(
        self,
        workload: Workload,
        optimizer: str | None,
        device: str,
        granule: int,
        blocks: Sequence[str] | None,
    ) -> None:
        self.blocks: list[Named] = find_blocks(workload.model, blocks)
        self._workload = workload
        self._granule = granule
        self._optimizer = make_optimizer(optimizer, workload.model, device=device)
        warm_up(self._optimizer)
        self.state = self._state_bytes()
        self.update_peak = 0
        self._trials: dict[tuple[Mode, ...], Trial] = {}

    def run(self, modes: Sequence[Mode]) -> Trial:
        """A step in these modes; one that ran before is not run again."""
        key = tuple(modes)
        if key not in self._trials:
            self._trials[key] = self._run(key)
        return self._trials[key]

    def uniform(self, mode: Mode) -> Trial:
        """A step with every block in one mode."""
        return self.run([mode] * len(self.blocks))

    def keep_levels(self) -> list[float]:
        """The distinct costs per byte of what a block could keep, the dearest first; a few of them
        stand for many.
        """
        seen = _Costs()
        with seen:
            self._workload.loss()
        levels = sorted(seen.found, reverse=True)
        if len(levels) <= MAX_LEVELS:
            return levels
        return [levels[round(k * (len(levels) - 1) / (MAX_LEVELS - 1))] for k in range(MAX_LEVELS)]

    def _run(self, modes: tuple[Mode, ...]) -> Trial:
        counter = StorageCounter(self._granule)
        chosen = [
            (named, mode) for named, mode in zip(self.blocks, modes, strict=True) if mode != NONE
        ]
        with CheckpointingHandle(chosen), _Marking(self.blocks, counter) as marking:
            with counter:
                backward(self._workload)
            peak = counter.peak() + self.state
            if not self.update_peak and self._optimizer is not None:
                self.update_peak = self._update(counter)
        for parameter in self._workload.model.parameters():
            parameter.grad = None
        return Trial(max(peak, self.update_peak), counter.flops, counter, marking.marks)

    def _update(self, before: StorageCounter) -> int:
        """The peak of the optimizer's step; the batch lies beside it."""
        assert self._optimizer is not None
        update = StorageCounter(self._granule)
        with update:
            self._optimizer.step()
        return update.peak() + sum(
            entry.size for entry in before.log if entry.born < 0 and entry.kind is None
        )

    def _state_bytes(self) -> int:
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        sizes = [
            t.numel() * t.element_size()
            for state in states
            for t in state.values()
            if isinstance(t, torch.Tensor)
        ]
        return sum(-(-size // self._granule) * self._granule for size in sizes)


def problem_of(bench: Bench, modes: Sequence[Mode]) -> Problem | None:
    """The blocks' weights in each mode; None where blocks do not run once each, one after the
    other.

    The first mode must be the one that keeps everything: what it runs is what nobody runs twice.
    """
    columns = []
    for mode in modes:
        trial = bench.uniform(mode)
        if not _one_after_the_other(trial.marks):
            return None
        columns.append([_option(trial, number) for number in range(len(bench.blocks))])
    plain = bench.uniform(modes[0])
    counter, first, last = plain.counter, plain.marks[0], plain.marks[-1]
    before = counter.at(-1) + bench.state
    return Problem(
        start=before + _level(counter, first.started),
        around=max(bench.update_peak, before + _highest(counter, 0, first.started)),
        head=_highest(counter, last.ended, last.returned) - _level(counter, last.ended),
        blocks=[
            [replace(option, cost=option.cost - row[0].cost) for option in row]
            for row in zip(*columns, strict=True)
        ],
    )


def _one_after_the_other(marks: Sequence[Marks]) -> bool:
    """Whether the blocks ran once each, forward in order and backward in reverse."""
    times = [mark.started for mark in marks] + [mark.returned for mark in reversed(marks)]
    return all(mark.calls == 1 and mark.returned > 0 for mark in marks) and times == sorted(times)


def _option(trial: Trial, number: int) -> Option:
    """A block as it was in one trial; its cost is that of its whole backward."""
    marks, counter = trial.marks, trial.counter
    mark, last = marks[number], number + 1 == len(marks)
    end = mark.ended if last else marks[number + 1].started
    done, flops = (
        (marks[number - 1].returned, marks[number - 1].flops)
        if number
        else (counter.clock, trial.flops)
    )
    return Option(
        held=_level(counter, end) - _level(counter, mark.started),
        forward=_highest(counter, mark.started, end) - _level(counter, mark.started),
        backward=_highest(counter, mark.returned, done) - _level(counter, end),
        cost=flops - mark.flops,
    )


def _level(counter: StorageCounter, clock: int) -> int:
    return counter.levels[clock - 1] if clock else 0


def _highest(counter: StorageCounter, start: int, end: int) -> int:
    """The highest level from one moment to another."""
    return max([_level(counter, start), *counter.levels[start:end]])


class _Marking:
    """Notes when each block runs forward and when its output's gradient is there."""

    def __init__(self, blocks: Sequence[Named], counter: StorageCounter) -> None:
        self.marks = [Marks() for _ in blocks]
        self._counter = counter
        self._handles: list[Any] = []
        for (_, module), mark in zip(blocks, self.marks, strict=True):
            self._handles.append(module.register_forward_pre_hook(self._start(mark)))
            self._handles.append(module.register_forward_hook(self._end(mark)))

    def __enter__(self) -> "_Marking":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, mark: Marks) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            mark.started, mark.calls = self._counter.clock, mark.calls + 1

        return hook

    def _end(self, mark: Marks) -> Callable[..., None]:
        def returned(gradient: torch.Tensor) -> None:
            mark.returned, mark.flops = self._counter.clock, self._counter.flops

        def hook(module: nn.Module, args: Any, out: Any) -> None:
            mark.ended = self._counter.clock
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(returned)
                    return

        return hook


class _Costs(TorchDispatchMode):
    """Collects what the results of expensive operators cost per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[float] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_expensive(func, args, kwargs or {}):
            self.found.add(float(f"{0.995 * cost_per_byte(func, args, kwargs or {}, out):.3g}"))
        return out
