"""What a judge may know of a model before any gradient is seen."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from gradsight.core.parameters import Named
from gradsight.health.window import Subject


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
        lost_eps=lost_eps_of(optimizers),
        memberships=memberships_of(parameters, optimizers) if optimizers else None,
    )


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
    """How often the optimizers were given each parameter."""
    counts: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                counts[id(tensor)] = counts.get(id(tensor), 0) + 1
    return [counts.get(id(named.tensor), 0) for named in parameters]
