"""Calls to an engine that do not keep it alive."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gradsight.core.guard import Guard
from gradsight.core.moments import listen
from gradsight.errors import GradsightError

if TYPE_CHECKING:
    from gradsight.ghost.blocks import BlockScorer


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does not keep its object alive; once that is gone, the call gives None."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


class LossScales:
    """Hears of scaled losses for as long as an engine is there."""

    def __init__(self, blocks: "BlockScorer") -> None:
        self._blocks = weakref.ref(blocks)
        guard = Guard(
            None, "loss scales", "scores cannot be divided by the loss scale", GradsightError
        )
        listen(self, guard, own_thread=True)
        self.close = weakref.finalize(blocks, guard.close)

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A GradScaler has multiplied a loss."""
        blocks = self._blocks()
        if blocks is not None:
            blocks.loss_scaled(scaler)
