"""Leaves out updates whose gradient is not finite: weights and optimizer stay as they were.

Where the numbers are known when the optimizer steps, its gradients are taken away for the step, and
put back after it: an optimizer passes over what has no gradient, so that neither momentum, nor
decay, nor a count of steps moves. (With gradients of zero momentum would move the weights.) What an
optimizer that is not torch's changes all the same is put back as it was. Where the numbers are
still on a device, a fused optimizer is given a flag there, as by a GradScaler; others wait for
them, once per step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core.group import ProcessGroup
from gradsight.core.problems import Problems
from gradsight.core.shards import local_part
from gradsight.session.readings import GradientReading

_WAITS = (
    'on_finding="skip" waits for the device once per step, because {name} cannot leave a step out '
    "by itself; a fused optimizer (fused=True) can"
)


@dataclass(frozen=True, slots=True)
class _Withheld:
    """What was taken from an optimizer for one step."""

    gradients: list[tuple[Tensor, Tensor]]
    state: dict[Any, dict[str, Any]]
    groups: list[dict[str, Any]]
    counts: dict[str, Any]
    """Its attributes that are plain numbers."""
    copies: list[tuple[Tensor, Tensor]]
    """Tensors that the step may change though it has no gradient, and what was in them."""

    def put_back(self, optimizer: Optimizer) -> None:
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        # Some count steps whatever has a gradient; LBFGS counts what its closure was asked.
        for key in [key for key in optimizer.state if key not in self.state]:
            del optimizer.state[key]
        for key, entries in self.state.items():
            optimizer.state[key].clear()
            optimizer.state[key].update(entries)
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(values)
        vars(optimizer).update(self.counts)
        with torch.no_grad():
            for tensor, value in self.copies:
                tensor.copy_(value)


class UpdateSkipper:
    """Decides on every optimizer step, on all ranks alike."""

    def __init__(self, group: ProcessGroup | None, problems: Problems) -> None:
        """`group`: where ranks hold parts of the gradients, they decide together."""
        self._group = group
        self._problems = problems
        self._withheld: dict[int, _Withheld] = {}
        self._flagged: set[int] = set()

    def before_update(
        self, optimizer: Optimizer, readings: Sequence[GradientReading], rows: Sequence[int]
    ) -> None:
        """The optimizer is about to use the gradients of these rows, which were read so."""
        known = all(reading.ready() for reading in readings)
        if not known and self._group is None and _takes_a_flag(optimizer):
            optimizer.found_inf = _flag(readings)  # type: ignore[attr-defined]
            self._flagged.add(id(optimizer))
            return
        if not known and not _will_take_a_flag(optimizer):
            self._problems.report("on_finding-skip", _WAITS.format(name=type(optimizer).__name__))
        bad = any(_is_bad(reading, rows) for reading in readings)
        if self._group is not None:
            bad = self._group.any(bad)
        if bad:
            self._withheld[id(optimizer)] = _withhold(optimizer)

    def after_update(self, optimizer: Optimizer) -> bool:
        """The optimizer has stepped: put back what was taken; whether it was left out."""
        if id(optimizer) in self._flagged:
            self._flagged.discard(id(optimizer))
            del optimizer.found_inf  # type: ignore[attr-defined]
        withheld = self._withheld.pop(id(optimizer), None)
        if withheld is None:
            return False
        withheld.put_back(optimizer)
        return True


def _is_bad(reading: GradientReading, rows: Sequence[int]) -> bool:
    # Not noted as known: the recorder looks at what came late, when the update was left out.
    norms = reading.norms.read() if reading.known is None else reading.known
    if norms.counts is None:
        return False
    wanted = set(rows)
    places = [place for place, row in enumerate(reading.rows) if row in wanted]
    # A count that is not known is -1: broken all the same.
    return bool(np.any(norms.counts[0][places]) or np.any(norms.counts[1][places]))


def _withhold(optimizer: Optimizer) -> _Withheld:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [(each, each.grad) for each in parameters if each.grad is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    return _Withheld(
        gradients,
        {key: dict(entries) for key, entries in optimizer.state.items()},
        [_without_parameters(group) for group in optimizer.param_groups],
        {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)},
        _copies(optimizer),
    )


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, and what some optimizers count there."""
    return {name: value for name, value in group.items() if name != "params"}


def _copies(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """What is in the tensors of an optimizer that is not torch's.

    torch's own pass over a parameter without a gradient; others may decay it all the same. On the
    host: a step that is left out must not be the one that runs out of memory.
    """
    if type(optimizer).step.__module__.startswith("torch.optim."):
        return []
    tensors = [each for group in optimizer.param_groups for each in _tensors(group.values())]
    tensors += [each for entries in optimizer.state.values() for each in _tensors(entries.values())]
    return [(each, each.detach().to("cpu", copy=True)) for each in map(local_part, tensors)]


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the values, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.detach())
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _takes_a_flag(optimizer: Optimizer) -> bool:
    """Whether it leaves this step out on the device; a GradScaler that does so is left alone."""
    is_free = getattr(optimizer, "found_inf", None) is None
    return _will_take_a_flag(optimizer) and is_free and not _lacks_momentum(optimizer)


def _lacks_momentum(optimizer: Optimizer) -> bool:
    """Whether fused SGD has no momentum yet: it would be uninitialised memory, were its very
    first step left out.
    """
    return any(
        parameter.grad is not None and not optimizer.state.get(parameter)
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
    )


def _will_take_a_flag(optimizer: Optimizer) -> bool:
    """Whether it leaves steps out on the device, from its second one on."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _flag(readings: Sequence[GradientReading]) -> Tensor:
    """1.0 where an entry is not finite, else 0.0, on the device: a fused optimizer counts with it.

    By largest entries, since squares of finite ones may overflow.
    """
    flags = [~torch.isfinite(vector).all() for each in readings for vector in each.norms.extremes()]
    return torch.stack(flags).any().to(torch.float32)
