"""What a judge may know of a model before any gradient is seen."""

from collections.abc import Sequence

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
        memberships=memberships_of(parameters, optimizers) if optimizers else None,
    )


def memberships_of(parameters: Sequence[Named], optimizers: Sequence[Optimizer]) -> list[int]:
    """How often the optimizers were given each parameter."""
    counts: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                counts[id(tensor)] = counts.get(id(tensor), 0) + 1
    return [counts.get(id(named.tensor), 0) for named in parameters]
