"""The factors that GradScalers give losses, heard of for as long as somebody scores blocks."""

import weakref
from typing import TYPE_CHECKING

import torch

from gradsight.core.guard import Guard
from gradsight.core.moments import listen

if TYPE_CHECKING:
    from gradsight.ghost.blocks import BlockScorer


class LossScales:
    """Hears of scaled losses for as long as an engine is there."""

    def __init__(self, blocks: "BlockScorer") -> None:
        self._blocks = weakref.ref(blocks)
        guard = Guard(None, "loss scales", "scores cannot be divided by the loss scale", Exception)
        listen(self, guard, own_thread=True)
        self.close = weakref.finalize(blocks, guard.close)

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A GradScaler has multiplied a loss."""
        blocks = self._blocks()
        if blocks is not None:
            blocks.loss_scaled(scaler)
