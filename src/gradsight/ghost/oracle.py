"""The slow exact twin: every sample alone through the model, pulled back with its own rows of the
batch's output gradient.

score_i = <D, J_i^T c_i>, where J_i is the derivative of the model's outputs for sample i alone and
c_i are sample i's rows of the gradient of the loss at the outputs of the whole batch. No rule, no
carrier and no probe is involved: plain autograd.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradsight.core.samples import NotSeparable, collecting, part_of, rowed
from gradsight.ghost.passes import ModelCall, tensors_in

Pull = Callable[[Sequence[Tensor], Sequence[Tensor]], Mapping[str, Tensor]]
"""From outputs and their gradients to <D, parameter gradient> by parameter name (and slot)."""


TwinError = NotSeparable
"""The twin cannot judge this model."""


def run(root: nn.Module, calls: Sequence[ModelCall], row: int | None = None) -> list[Tensor]:
    """The rowed outputs of all calls of the model, with the whole batch or with one sample alone."""
    losses: list[Tensor] = []
    outputs: list[Tensor] = []
    with collecting(losses):
        for call in calls:
            args, kwargs = call.whole() if row is None else call.row(row)
            outputs += tensors_in(root(*args, **kwargs))
    return rowed(outputs, losses)


def row_of(whole: Tensor, cotangent: Tensor, alone: Tensor, i: int, batch: int) -> Tensor:
    """Sample i's part of the batch's output gradient, after proof that its output alone is its part
    of the batch's output.
    """
    return cotangent[part_of(whole, alone, i, batch)]


def twin_scores(
    root: nn.Module,
    calls: Sequence[ModelCall],
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    pull: Pull,
    turns: Sequence[tuple[int, bool]],
) -> dict[str, list[Tensor]]:
    """<D, g_i> by parameter, for each turn: a row, and whether its gradient counts. Outputs and
    cotangents are the batch's.
    """
    table: dict[str, list[Tensor]] = {}
    for i, counts in turns:
        alone = run(root, calls, i)
        if len(alone) != len(outputs):
            raise TwinError(
                f"the model gives {len(outputs)} outputs for the batch but {len(alone)} for one sample alone"
            )
        pieces = [
            row_of(y, c, y1, i, calls[0].batch)
            for y, c, y1 in zip(outputs, cotangents, alone, strict=True)
        ]
        for name, value in pull(
            alone, pieces if counts else [torch.zeros_like(p) for p in pieces]
        ).items():
            table.setdefault(name, []).append(value)
    return table
