"""The user's optimizers: one or several, inside whatever wrapper a library hands out."""

import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

from torch.optim import Optimizer

from gradsight.errors import UsageError


def innermost_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer itself where a library (Accelerate, Lightning) hands out a wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return innermost_optimizer(inner)
    return optimizer  # type: ignore[no-any-return]


_STEP_WRAPPER = next(
    (
        constant
        for constant in Optimizer.profile_hook_step.__code__.co_consts
        if isinstance(constant, CodeType)
    ),
    None,
)
"""The code that torch puts around every `step`, and that calls the hooks of steps."""


def calls_of_step(optimizer: Optimizer) -> int:
    """How many calls of this optimizer's `step` this code runs inside of.

    Torch calls the hooks twice where the `step` of a subclass calls `super().step()`.
    """
    calls = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_WRAPPER and frame.f_locals["args"][0] is optimizer:
            calls += 1
        frame = frame.f_back  # type: ignore[assignment]
    return calls


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
