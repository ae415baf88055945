# mypy: allow-untyped-calls
"""A model's blocks, weighed on fake tensors in one mode after the other."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradsight.memory.blocks import NamedModule, find_blocks
from gradsight.memory.checkpointed import CheckpointingHandle
from gradsight.memory.choose import BlockOption, BlockProblem
from gradsight.memory.counter import StorageCounter
from gradsight.memory.equal_parameters import step_fakes, warm_up_fakes
from gradsight.memory.operators import cost_per_byte
from gradsight.memory.policy import NONE, Mode
from gradsight.memory.predict import granule_of
from gradsight.memory.progress import tell
from gradsight.memory.ranks import bucket_bytes, shard
from gradsight.memory.selective import is_expensive
from gradsight.memory.setting import StepSetting
from gradsight.memory.workload import (
    Workload,
    backward,
    make_optimizer,
    state_bytes,
)

MAX_LEVELS = 4
"""How many costs per byte stand for all that a model has: each of them is a fake step to run."""


@dataclass(slots=True)
class BlockTimes:
    """When a block's forward started and ended and its backward started, on the counter's clock."""

    started: int = 0
    ended: int = 0
    returned: int = 0
    flops: int = 0
    """Operations run until its backward started."""
    calls: int = 0


@dataclass(frozen=True, slots=True)
class FakeStep:
    """One step on fake tensors in one choice of modes."""

    peak: int
    flops: int
    counter: StorageCounter
    times: Sequence[BlockTimes]


class FakeSteps:
    """A model that runs its step again and again, each time in other modes.

    Use it inside fake_device().
    """

    def __init__(
        self,
        workload: Workload,
        setting: StepSetting,
        mesh: Any = None,
    ) -> None:
        self.blocks: list[NamedModule] = find_blocks(workload.model, setting.blocks)
        shard(workload, setting, mesh)
        self._workload = workload
        self._granule = granule_of(setting.device)
        self._optimizer = make_optimizer(setting.optimizer, workload.model, device=setting.device)
        warm_up_fakes(self._optimizer)
        self._bucket_bytes = bucket_bytes(workload.model, setting, self._granule)
        self.state_bytes = state_bytes(self._optimizer, self._granule) + self._bucket_bytes
        """What lies beside forward and backward: the optimizer's state, and DDP's buckets."""
        self.update_peak = 0
        """The peak of the optimizer's step, which no mode of any block changes."""
        self._costs = _CostCollector()
        self._steps: dict[tuple[Mode, ...], FakeStep] = {}

    def run(self, modes: Sequence[Mode]) -> FakeStep:
        """A step in these modes; one that ran before is not run again."""
        key = tuple(modes)
        if key not in self._steps:
            self._steps[key] = self._run(key)
        return self._steps[key]

    def uniform(self, mode: Mode) -> FakeStep:
        """A step with every block in one mode."""
        return self.run([mode] * len(self.blocks))

    def keep_levels(self) -> list[float]:
        """The distinct costs per byte of what a block could keep, the dearest first.

        Where there are many, a few stand for them.
        """
        self.uniform(NONE)
        levels = sorted(self._costs.found, reverse=True)
        if len(levels) <= MAX_LEVELS:
            return levels
        stride = (len(levels) - 1) / (MAX_LEVELS - 1)
        return [levels[round(number * stride)] for number in range(MAX_LEVELS)]

    def _run(self, modes: tuple[Mode, ...]) -> FakeStep:
        tell(f"Weighing {len(modes)} blocks, step {len(self._steps) + 1}")
        counter = StorageCounter(self._granule)
        checkpointing = CheckpointingHandle(list(zip(self.blocks, modes, strict=True)))
        with checkpointing, _BlockClock(self.blocks, counter) as block_clock:
            with counter, self._collecting(modes):
                backward(self._workload)
                counter.mark_parameters(self._workload.model.parameters())
            peak = counter.peak() + self.state_bytes
            if not self.update_peak and self._optimizer is not None:
                self.update_peak = self._update(counter, self._optimizer)
        for parameter in self._workload.model.parameters():
            parameter.grad = None
        return FakeStep(max(peak, self.update_peak), counter.flops, counter, block_clock.times)

    def _collecting(self, modes: tuple[Mode, ...]) -> AbstractContextManager[Any]:
        """Costs are collected in the plain step, which is run in any case."""
        if all(mode == NONE for mode in modes):
            return self._costs
        return nullcontext()

    def _update(self, before: StorageCounter, optimizer: torch.optim.Optimizer) -> int:
        """The peak of the optimizer's step; the batch lies beside it."""
        update = StorageCounter(self._granule)
        with update:
            step_fakes(optimizer, update)
        inputs = [entry for entry in before.log if entry.born < 0 and entry.kind is None]
        return update.peak() + self._bucket_bytes + sum(entry.size for entry in inputs)


def problem_of(steps: FakeSteps, modes: Sequence[Mode]) -> BlockProblem | None:
    """The blocks' weights in each mode; None where blocks do not run once each and in order.

    The first mode must be the one that keeps everything: what it runs is what nobody runs twice.
    """
    columns: list[list[BlockOption]] = []
    for mode in modes:
        step = steps.uniform(mode)
        if not one_after_the_other(step.times):
            return None
        columns.append([option_of(step, number) for number in range(len(steps.blocks))])
    return problem_around(steps, list(zip(*columns, strict=True)))


def problem_around(steps: FakeSteps, rows: Sequence[Sequence[BlockOption]]) -> BlockProblem:
    """The blocks' options, the first of each keeping everything, and what surrounds the blocks."""
    plain = steps.uniform(NONE)
    counter = plain.counter
    first = plain.times[0]
    last = plain.times[-1]
    before = counter.at(-1) + steps.state_bytes
    return BlockProblem(
        start=before + counter.level(first.started),
        around=max(steps.update_peak, before + counter.highest_level(0, first.started)),
        head=counter.highest_level(last.ended, last.returned) - counter.level(last.ended),
        blocks=[_with_extra_cost(row) for row in rows],
    )


def _with_extra_cost(row: Sequence[BlockOption]) -> list[BlockOption]:
    """A block's options with the cost beyond that of the first one, which recomputes nothing."""
    return [replace(option, cost=option.cost - row[0].cost) for option in row]


def one_after_the_other(times: Sequence[BlockTimes]) -> bool:
    """Whether the blocks ran once each, forward in order and backward in reverse."""
    if any(block.calls != 1 or block.returned == 0 for block in times):
        return False
    forward = [block.started for block in times]
    backwards = [block.returned for block in reversed(times)]
    moments = forward + backwards
    return moments == sorted(moments)


def option_of(step: FakeStep, number: int) -> BlockOption:
    """A block as it was in one step; its cost is that of its whole backward."""
    counter = step.counter
    times = step.times
    block = times[number]
    end = block.ended
    if number + 1 < len(times):
        end = times[number + 1].started
    # Its backward ends where that of the block before it starts, the first one's with the step.
    done = counter.clock
    flops = step.flops
    if number > 0:
        done = times[number - 1].returned
        flops = times[number - 1].flops
    before = counter.level(block.started)
    return BlockOption(
        held=counter.level(end) - before,
        forward=counter.highest_level(block.started, end) - before,
        backward=counter.highest_level(block.returned, done) - counter.level(end),
        cost=flops - block.flops,
    )


class _BlockClock:
    """Notes when each block runs forward and when its output's gradient is there."""

    def __init__(self, blocks: Sequence[NamedModule], counter: StorageCounter) -> None:
        self.times = [BlockTimes() for _ in blocks]
        self._counter = counter
        self._handles: list[Any] = []
        for (_, module), times in zip(blocks, self.times, strict=True):
            self._handles.append(module.register_forward_pre_hook(self._start(times)))
            self._handles.append(module.register_forward_hook(self._end(times)))

    def __enter__(self) -> "_BlockClock":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, times: BlockTimes) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            times.started = self._counter.clock
            times.calls += 1

        return hook

    def _end(self, times: BlockTimes) -> Callable[..., None]:
        def returned(gradient: torch.Tensor) -> None:
            times.returned = self._counter.clock
            times.flops = self._counter.flops

        def hook(module: nn.Module, args: Any, out: Any) -> None:
            times.ended = self._counter.clock
            # One output is enough: its gradient comes just before the block's own backward. Module
            # hooks for backward would put nodes of their own into the graph.
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(returned)
                    return

        return hook


class _CostCollector(TorchDispatchMode):
    """Collects what the results of expensive operators of the forward pass cost per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[float] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compiled code is eager in here, and torch's guard against the compiler takes time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward and is_expensive(func, args, kwargs):
            # A little below the cost, and in three digits: a threshold of this text must keep the
            # operator that it came from.
            threshold = 0.995 * cost_per_byte(func, args, kwargs, out)
            self.found.add(float(f"{threshold:.3g}"))
        return out
