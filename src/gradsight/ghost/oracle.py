"""The slow exact twin: every sample alone through the model, pulled back with its own rows of c.

score_i = <D, J_i^T c_i>, where J_i is the derivative of the model's outputs for sample i alone and
c_i are sample i's rows of the gradient of the loss at the outputs of the whole batch. No rule, no
tangent and no probe is involved: plain autograd.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradsight.core.per_sample import BatchOutputs, outputs_with_rows
from gradsight.core.samples import NotSeparable, SplitCall

Pull = Callable[[Sequence[Tensor], Sequence[Tensor]], Mapping[str, Tensor]]
"""From outputs and their gradients to <D, parameter gradient> by parameter name (and slot)."""

TwinError = NotSeparable
"""The twin cannot judge this model."""


def twin_scores(
    root: nn.Module,
    calls: Sequence[SplitCall],
    batch: BatchOutputs,
    pull: Pull,
    turns: Sequence[tuple[int, bool]],
) -> dict[str, list[Tensor]]:
    """<D, g_i> by parameter, for each turn: a row, and whether its gradient counts."""
    table: dict[str, list[Tensor]] = {}
    for row, counts in turns:
        alone = outputs_with_rows(root, calls, row)
        if len(alone) != len(batch.outputs):
            raise TwinError(
                f"the model gives {len(batch.outputs)} outputs for the batch but {len(alone)} for "
                "one sample alone"
            )
        pieces = batch.cotangents_of(row, alone)
        if not counts:
            pieces = [torch.zeros_like(piece) for piece in pieces]
        for name, value in pull(alone, pieces).items():
            table.setdefault(name, []).append(value)
    return table
