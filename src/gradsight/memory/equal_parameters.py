"""An optimizer's step on fake tensors: parameters that are equal need not be stepped one by one.

In torch's form for the CPU an optimizer goes from parameter to parameter, and what it makes for one
is gone when it comes to the next but one. So the peak is that of two neighbours, with all states
and gradients beside it, and one pair of each kind shows it. The form for many tensors at once is
run as it is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gradsight.memory.counter import StorageCounter


def warm_up_fakes(optimizer: Optimizer | None) -> None:
    """Make the optimizer's state, as every step but the first finds it."""
    if optimizer is None:
        return
    for parameter in _parameters(optimizer):
        parameter.grad = torch.zeros_like(parameter)
    _step_pairs(optimizer)
    made: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = made.setdefault(_kind(parameter, group), optimizer.state.get(parameter))
            if parameter not in optimizer.state and state is not None:
                optimizer.state[parameter] = {name: _like(each) for name, each in state.items()}
    optimizer.zero_grad(set_to_none=True)


def step_fakes(optimizer: Optimizer, counter: StorageCounter) -> None:
    """The optimizer's step under a count, with all that it would use."""
    for parameter in _parameters(optimizer):
        if parameter.grad is not None:  # others are passed over
            state = dict(optimizer.state[parameter])
            counter.see_before([parameter, parameter.grad, *tree_leaves(state)])
    _step_pairs(optimizer)


def _step_pairs(optimizer: Optimizer) -> None:
    """Step neighbours of every two kinds once, in runs as they follow each other."""
    groups = optimizer.param_groups
    everything = [list(group["params"]) for group in groups]
    try:
        for group in groups:
            group["params"] = []
        for group, parameters in zip(groups, everything, strict=True):
            for run in neighbours([_kind(each, group) for each in parameters]):
                group["params"] = [parameters[number] for number in run]
                optimizer.step()
            group["params"] = []
    finally:
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = parameters


def neighbours(kinds: Sequence[Any]) -> Iterator[list[int]]:
    """Runs of positions in which every two kinds that follow each other do so at least once.

    >>> list(neighbours("eabababab" + "h"))
    [[0, 1, 2, 3], [8, 9]]
    """
    run: list[int] = []
    seen = set()
    for number, kind in enumerate(kinds):
        pair = (kinds[number - 1] if number else None, kind)
        if pair in seen:
            continue
        seen.add(pair)
        if run and run[-1] < number - 1:
            yield run
            run = []
        if number and not run:
            run = [number - 1]
        run.append(number)
    if run:
        yield run


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _like(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def _kind(parameter: torch.Tensor, group: dict[str, Any]) -> tuple[Any, ...]:
    """What parameters must have in common to need the same in a step."""
    # Shards are few, and need not be equal on this rank.
    if group.get("foreach") or type(parameter.data) is not FakeTensor:
        return (id(parameter),)
    grad = parameter.grad
    layout = None if grad is None else (grad.layout, grad.dtype, grad.stride())
    return (parameter.shape, parameter.stride(), parameter.dtype, layout)
