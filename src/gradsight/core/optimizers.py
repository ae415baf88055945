"""The user's optimizers: one or several, inside whatever wrapper a library hands out."""

import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from torch.optim import Optimizer

from gradsight.errors import UsageError


def innermost_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer that updates the weights.

    It may be inside a wrapper of a library (Accelerate, Lightning), or inside another optimizer
    (SAM, Lookahead).
    """
    innermost: Optimizer = wrapping(optimizer)[-1]
    return innermost


def wrapping(optimizer: Any) -> list[Any]:
    """Return an optimizer, the one inside it, and so on to the one that updates the weights."""
    chain = [optimizer]
    while True:
        inner = getattr(chain[-1], "optimizer", None)
        if not isinstance(inner, Optimizer):
            wrapped = wrapped_optimizers(chain[-1])
            inner = wrapped[0] if len(wrapped) == 1 else None
        if inner is None or any(inner is each for each in chain):
            return chain
        chain.append(inner)


def wrapped_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers that an optimizer holds and that update parameters of its own."""
    held: list[Any] = []
    for value in getattr(optimizer, "__dict__", {}).values():
        held += value if isinstance(value, list | tuple) else [value]
    others = [each for each in held if isinstance(each, Optimizer) and each is not optimizer]
    if not others or not isinstance(optimizer, Optimizer):
        return []
    mine = parameters_of(optimizer)
    return [each for each in others if mine & parameters_of(each)]


def parameters_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the tensors that an optimizer was given."""
    return {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}


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


def is_inside_another_step() -> bool:
    """Return whether the optimizer that is stepping was called by the `step` of another one."""
    frame: FrameType | None = sys._getframe(1)
    stepping = []
    while frame is not None:
        if frame.f_code is _STEP_WRAPPER:
            stepping.append(frame.f_locals["args"][0])
        frame = frame.f_back
    return any(each is not stepping[0] for each in stepping)


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
