"""The gradient of each sample run alone: J_i^T c_i, with its own rows of the batch's c.

Sample i goes through the model alone, and is pulled back with its rows of the gradient that came to
the outputs of the whole batch. That its output alone is its part of the batch's is proven first.
The ghost engine's twin does so in evaluation mode, with the gradient dotted with a direction; the
diagnosis does so in the recorded call's own state, with the random numbers that the sample had in
the batch. What they share is here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradsight.core.samples import (
    SplitCall,
    collecting_loss_inputs,
    rows_of_sample,
    tensors_in,
    with_rows,
)


@dataclass(frozen=True, slots=True)
class BatchOutputs:
    """The outputs of the whole batch in which samples have rows, and the gradients at them."""

    outputs: Sequence[Tensor]
    cotangents: Sequence[Tensor]
    size: int
    """How many samples."""
    within: float | None = None
    """The relative difference between alone and in the batch that is rounding; None: by dtype."""

    def cotangents_of(self, row: int, alone: Sequence[Tensor]) -> list[Tensor]:
        """A sample's rows of the gradients, after proof that `alone` is its part of the outputs."""
        pieces = []
        for output, cotangent, own in zip(self.outputs, self.cotangents, alone, strict=True):
            pieces.append(cotangent[rows_of_sample(output, own, row, self.size, self.within)])
        return pieces


def outputs_with_rows(
    root: nn.Module, calls: Sequence[SplitCall], row: int | None = None
) -> list[Tensor]:
    """The outputs of all calls in which samples have rows: of the batch, or of one sample alone."""
    losses: list[Tensor] = []
    outputs: list[Tensor] = []
    with collecting_loss_inputs(losses):
        for call in calls:
            args, kwargs = call.whole() if row is None else call.row(row)
            outputs += tensors_in(root(*args, **kwargs))
    return with_rows(outputs, losses)
