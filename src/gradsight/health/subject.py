"""What a judge may know of a model before any gradient is seen."""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from gradsight.core.experts import expert_groups
from gradsight.core.parameters import Named
from gradsight.health.adapters import frozen_adapters
from gradsight.health.trainers import trainer_of
from gradsight.health.window import GroupSettings, OnlyOptimizer, SeveralOptimizers, Subject


def subject_of(
    model: nn.Module, parameters: Sequence[Named], optimizers: Sequence[Optimizer]
) -> Subject:
    """The model's parameters, and how its optimizers hold them."""
    owners = {
        id(tensor): type(module).__name__
        for module in model.modules()
        for tensor in module._parameters.values()
    }
    described = [named.describe() for named in parameters]
    return Subject(
        names=[parameter.name for parameter in described],
        shapes=[parameter.shape for parameter in described],
        trainable=[parameter.trainable for parameter in described],
        kinds=[owners.get(id(named.tensor), "") for named in parameters],
        half=[parameter.dtype == "float16" for parameter in described],
        groups=groups_of(optimizers),
        group_of=group_of_rows(parameters, optimizers),
        normalising=bool(optimizers) and all(map(_is_normalising, optimizers)),
        lost_eps=lost_eps_of(optimizers),
        memberships=memberships_of(parameters, optimizers) if optimizers else None,
        experts=expert_groups(model, parameters),
        optimizer=only_optimizer(parameters, optimizers),
        several=several_optimizers(parameters, optimizers),
        trainer=trainer_of([group for each in optimizers for group in each.param_groups]),
        frozen_adapters=frozen_adapters(model, parameters),
        is_pretrained=_is_pretrained(model, parameters),
    )


def _is_pretrained(model: nn.Module, parameters: Sequence[Named]) -> bool:
    """Whether weights were loaded: a part is frozen, or transformers notes where they are from."""
    if not all(named.tensor.requires_grad for named in parameters):
        return True
    configs = [getattr(module, "config", None) for module in model.modules()]
    return any(bool(getattr(config, "_name_or_path", "")) for config in configs)


def only_optimizer(
    parameters: Sequence[Named], optimizers: Sequence[Optimizer]
) -> OnlyOptimizer | None:
    """Return the optimizer as advice names it, if there is exactly one."""
    if len(optimizers) != 1:
        return None
    (optimizer,) = optimizers
    kind = type(optimizer)
    is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if kind is not getattr(torch.optim, kind.__name__, None):
        return OnlyOptimizer(kind.__name__, is_scheduled)
    defaults = _defaults_of(kind)
    usual = _number(defaults.get("lr")) or 1e-3
    call = _call_of(optimizer, defaults, parameters)
    return OnlyOptimizer(kind.__name__, is_scheduled, usual, call)


def _call_of(
    optimizer: Optimizer, defaults: Mapping[str, Any], parameters: Sequence[Named]
) -> str | None:
    """Code that makes this optimizer, if it holds the whole model with the same settings."""
    groups = optimizer.param_groups
    held = {id(tensor) for group in groups for tensor in group["params"]}
    learning = {id(named.tensor) for named in parameters if named.tensor.requires_grad}
    if not learning <= held <= {id(named.tensor) for named in parameters}:
        return None
    made = construction_of(optimizer, defaults)
    return None if made is None else f"optimizer = {made}"


def several_optimizers(
    parameters: Sequence[Named], optimizers: Sequence[Optimizer]
) -> SeveralOptimizers | None:
    """Return what advice may know of the optimizers, if there is more than one."""
    if len(optimizers) < 2:
        return None
    counts = Counter(
        frozenset(id(tensor) for group in optimizer.param_groups for tensor in group["params"])
        for optimizer in optimizers
    )
    twice = {each for held, count in counts.items() if count > 1 for each in held}
    rows = tuple(row for row, named in enumerate(parameters) if id(named.tensor) in twice)
    return SeveralOptimizers(construction_at_rate(optimizers[-1]), rows)


def construction_at_rate(optimizer: Optimizer) -> str | None:
    """Return code that makes such an optimizer, with {given} for the parameters."""
    made = construction_of(optimizer)
    if made is None:
        return None
    return made.replace("{lr}", f"{_first_rate(optimizer.param_groups[0]):.3g}")


def construction_of(optimizer: Optimizer, defaults: Mapping[str, Any] | None = None) -> str | None:
    """Return code that makes an optimizer with the same settings.

    It has {given} for the parameters and {lr}. None: torch has no such class, or groups differ.
    """
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None):
        return None
    if defaults is None:
        defaults = _defaults_of(kind)
    groups = optimizer.param_groups
    if len({_first_rate(group) for group in groups}) > 1:
        return None
    arguments = ""
    for name, default in defaults.items():
        values = [group[name] for group in groups if name in group]
        if name in ("params", "lr") or not values:
            continue
        if not all(value is None or isinstance(value, _PLAIN) for value in values):
            return None
        if any(value != values[0] for value in values):
            return None
        if values[0] != default:
            arguments += f", {name}={values[0]!r}"
    return f"torch.optim.{kind.__name__}({{given}}, lr={{lr}}{arguments})"


def _first_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate that a group began with, as far as that is known."""
    return _number(group.get("initial_lr", group.get("lr")))


def _defaults_of(kind: type) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(kind).parameters.items()}


_PLAIN = (bool, int, float, str, tuple)


_PENALTY = {"Adam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "NAdam", "RAdam", "ASGD", "Rprop"}
"""Optimizers whose weight decay is a term of the gradient, which they divide by its size."""


_STRONG = 0.5
_STRONG_FOR_SGD = 0.02
"""Decays from here on are beyond what is usual: 0.1 with AdamW, 5e-4 with SGD."""


def groups_of(optimizers: Sequence[Optimizer]) -> tuple[GroupSettings, ...]:
    """What every group of the optimizers does now."""
    groups = []
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            lr = _number(group.get("lr"))
            name = f"{type(optimizer).__name__} {number}"
            groups.append(GroupSettings(name, lr, _shrinks(optimizer, group, lr)))
    return tuple(groups)


def group_of_rows(
    parameters: Sequence[Named], optimizers: Sequence[Optimizer]
) -> tuple[int | None, ...]:
    """The group of every parameter, as a position in `groups_of`; the first that holds it."""
    if not optimizers:
        return ()
    places: dict[int, int] = {}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for place, group in enumerate(groups):
        for tensor in group["params"]:
            places.setdefault(id(tensor), place)
    return tuple(places.get(id(named.tensor)) for named in parameters)


def _shrinks(optimizer: Optimizer, group: Mapping[str, Any], lr: float) -> float:
    decay = _number(group.get("weight_decay"))
    apart = bool(group.get("decoupled_weight_decay"))
    if type(optimizer).__name__ in _PENALTY and not apart:
        return 0.0
    is_sgd = isinstance(optimizer, SGD)
    if decay < (_STRONG_FOR_SGD if is_sgd else _STRONG):
        return 0.0
    # A momentum adds up the decays of some steps.
    momentum = min(0.99, _number(group.get("momentum"))) if is_sgd else 0.0
    return lr * decay / (1 - momentum)


def _number(value: object) -> float:
    """A number that can be had without waiting for a device; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else 0.0
    return float(value) if isinstance(value, (int, float)) else 0.0


def _is_normalising(optimizer: Optimizer) -> bool:
    """Whether it divides by the size of past gradients: such optimizers guard that by an eps."""
    return all("eps" in group for group in optimizer.param_groups)


def lost_eps_of(optimizers: Sequence[Optimizer]) -> float | None:
    """An eps that rounds to 0 in float16 parameters: then Adam divides by 0."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or eps == 0:
                continue
            in_half = any(tensor.dtype == torch.float16 for tensor in group["params"])
            if in_half and float(torch.tensor(eps, dtype=torch.float16)) == 0:
                return eps
    return None


def memberships_of(parameters: Sequence[Named], optimizers: Sequence[Optimizer]) -> list[int]:
    """Return how often an optimizer was given each parameter: the largest number of any optimizer.

    Two optimizers may share parameters; `StepSignals.updated_twice` says whether that does harm.
    """
    counts: Counter[int] = Counter()
    for optimizer in optimizers:
        counts |= Counter(
            id(tensor) for group in optimizer.param_groups for tensor in group["params"]
        )
    return [counts[id(named.tensor)] for named in parameters]
