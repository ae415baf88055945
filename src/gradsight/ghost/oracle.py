"""The slow exact twin: every sample alone through the model, pulled back with its own rows of the batch's output gradient.

score_i = <D, J_i^T c_i>, where J_i is the derivative of the model's outputs for sample i alone and c_i are sample i's rows of
the gradient of the loss at the outputs of the whole batch. No rule, no carrier and no probe is involved: plain autograd.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradsight.errors import GradsightError
from gradsight.ghost.passes import ModelCall, tensors_in

LOSSES = frozenset(
    {
        F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits, F.kl_div, F.gaussian_nll_loss, F.poisson_nll_loss, F.soft_margin_loss,
        F.multilabel_soft_margin_loss, F.multi_margin_loss,
    }
)  # fmt: skip
"""Loss functions whose first argument holds rows of samples, and whose other arguments are data."""

Pull = Callable[[Sequence[Tensor], Sequence[Tensor]], Mapping[str, Tensor]]
"""From outputs and their gradients to <D, parameter gradient> by parameter name (and slot)."""


class TwinError(GradsightError):
    """The twin cannot judge this model: samples are not independent in it, or cannot be taken apart."""


class LossInputs(TorchFunctionMode):
    """Collects what goes into loss functions, for models that return nothing but their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation; remember the predictions if it is a loss."""
        if func in LOSSES:
            self.seen.append(args[0] if args else (kwargs or {})["input"])
        return func(*args, **(kwargs or {}))


def rowed(outputs: Sequence[Tensor], losses: Sequence[Tensor]) -> list[Tensor]:
    """The outputs that samples have rows in: the model's, or what its loss functions were given."""
    own = [y for y in outputs if usable(y)]
    return own or [y for y in losses if usable(y)]


def usable(y: Tensor) -> bool:
    """Whether a tensor can be pulled back by rows."""
    return y.is_floating_point() and y.requires_grad and y.dim() > 0


@contextmanager
def collecting(seen: list[Tensor]) -> Iterator[None]:
    """Append to `seen` what loss functions are given in here."""
    with LossInputs() as mode:
        yield
    seen += mode.seen


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
    """Sample i's part of the batch's output gradient, after proof that its output alone is its part of the batch's output."""
    if batch == 1 and whole.shape == alone.shape:
        return cotangent
    dims = [d for d in range(alone.dim()) if whole.shape[d] != alone.shape[d]] if whole.dim() == alone.dim() else []
    if len(dims) != 1 or whole.shape[dims[0]] != batch * alone.shape[dims[0]]:
        raise TwinError(
            f"the model's output has shape {tuple(whole.shape)} for {batch} samples but {tuple(alone.shape)} for one: "
            "the rows of a sample cannot be told in it"
        )
    (dim,), size = dims, alone.shape[dims[0]]
    for part in (slice(i * size, (i + 1) * size), slice(i, None, batch)):
        index = (slice(None),) * dim + (part,)
        if close(whole[index], alone):
            return cotangent[index]
    raise TwinError(
        f"sample {i} alone gives another output than in the batch: samples are not independent in this model "
        "(statistics over the batch, or routing that depends on it), or the samples are not where they were looked for"
    )


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are the same up to rounding, judged by their largest entry."""
    scale = max(float(a.detach().abs().max()), 1e-30) if a.numel() else 1.0
    return not a.numel() or float((a.detach() - b.detach()).abs().max()) <= tolerance(a.dtype) * scale


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference that rounding may cause in a type."""
    return {torch.float64: 1e-8, torch.float32: 1e-3}.get(dtype, 1e-1)


def twin_scores(
    root: nn.Module,
    calls: Sequence[ModelCall],
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    pull: Pull,
    turns: Sequence[tuple[int, bool]],
) -> dict[str, list[Tensor]]:
    """<D, g_i> by parameter, for each turn: a row, and whether its gradient counts. Outputs and cotangents are the batch's."""
    table: dict[str, list[Tensor]] = {}
    for i, counts in turns:
        alone = run(root, calls, i)
        if len(alone) != len(outputs):
            raise TwinError(f"the model gives {len(outputs)} outputs for the batch but {len(alone)} for one sample alone")
        pieces = [row_of(y, c, y1, i, calls[0].batch) for y, c, y1 in zip(outputs, cotangents, alone, strict=True)]
        for name, value in pull(alone, pieces if counts else [torch.zeros_like(p) for p in pieces]).items():
            table.setdefault(name, []).append(value)
    return table
