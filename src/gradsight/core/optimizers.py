"""The user's optimizers: one or several, inside whatever wrapper a library hands out."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from gradsight.errors import UsageError


def innermost_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer itself where a library (Accelerate, Lightning) hands out a wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return innermost_optimizer(inner)
    return optimizer  # type: ignore[no-any-return]


def optimizer_list(optimizer: object) -> list[Optimizer]:
    """One optimizer or several as a list; anything else is an error that says what came."""
    if optimizer is None:
        return []
    given = optimizer
    if isinstance(optimizer, Optimizer) or hasattr(optimizer, "param_groups"):
        given = [optimizer]
    if isinstance(given, (str, dict)) or not isinstance(given, Iterable):
        raise UsageError(
            "optimizer must be a torch optimizer or a sequence of them, "
            f"got {type(optimizer).__name__}"
        )
    optimizers = list(given)
    for each in optimizers:
        if not isinstance(innermost_optimizer(each), Optimizer):
            raise UsageError(
                "optimizer must be a torch optimizer or a sequence of them, "
                f"got one {type(each).__name__}"
            )
    return optimizers
