"""What a loss function was given, read from its values and from the operation that made them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.values.first_step import CountedLabels, FedLoss

_ROWS = 256
"""Rows of scores that are looked at."""
_KEEPING = (
    "View", "Reshape", "UnsafeView", "ToCopy", "Transpose", "Permute", "Squeeze", "Unsqueeze",
    "Clone", "Slice", "Select", "Expand", "TBackward", "Alias", "Contiguous", "AsStrided", "Index",
    "Cat", "Stack", "Movedim",
)  # fmt: skip
"""Operations that move entries and leave their values alone."""
_FAR = 12
LOGITS = "logits"
PROBABILITIES = "probabilities"
LOG_PROBABILITIES = "log-probabilities"


def what_was_fed(
    function: Any, scores: Tensor, target: Tensor, options: Mapping[str, Any], place: str | None
) -> FedLoss | None:
    """What a loss was given, where that is not what it takes; None where all is well.

    log_softmax before cross_entropy changes nothing: it is well.
    """
    given: str | None = None
    wanted = LOGITS
    if function is F.cross_entropy:
        given = _instead_of_logits(scores)
    elif function is F.binary_cross_entropy_with_logits:
        given = PROBABILITIES if _made_by(scores) else None
    elif function is F.nll_loss:
        wanted = LOG_PROBABILITIES
        given = _instead_of_logs(scores, _rows(scores))
    elif function is F.kl_div:
        wanted = LOG_PROBABILITIES
        given = _instead_of_logs(scores, None)
        is_log = bool(options.get("log_target", False))
        if given is None and not is_log and bool((target.detach() < 0).any()):
            given = f"{LOG_PROBABILITIES} as targets"
            wanted = f"{PROBABILITIES} there, or log_target=True"
    if given is None:
        return None
    return FedLoss(function.__name__, given, wanted, place)


def counted_labels(
    function: Any, target: Tensor, counts: Tensor, options: Mapping[str, Any], place: str | None
) -> CountedLabels:
    """How many labels of a classification count."""
    is_mean = options.get("reduction", "mean") == "mean"
    return CountedLabels(
        function.__name__, target.numel(), int(counts.sum()), is_mean=is_mean, place=place
    )


def _rows(scores: Tensor) -> Tensor:
    """Some rows of scores, the classes last, in a type that can be computed with."""
    values = scores.detach()
    if values.dim() > 2:
        values = values.movedim(1, -1)
    values = values.reshape(-1, values.shape[-1])
    return values[:: max(1, len(values) // _ROWS)][:_ROWS].float()


def _tolerance(scores: Tensor) -> float:
    return 1e-3 if scores.dtype in (torch.float32, torch.float64) else 2e-2


def _instead_of_logits(scores: Tensor) -> str | None:
    if scores.dim() < 2:
        return None
    rows = _rows(scores)
    if not rows.numel() or rows.shape[-1] < 2:
        return None
    sums_to_one = bool(((rows.sum(-1) - 1).abs() < _tolerance(scores)).all())
    if sums_to_one and bool((rows >= 0).all()) and bool((rows < 1).any()):
        return PROBABILITIES
    return PROBABILITIES if _made_by(scores) else None


def _instead_of_logs(scores: Tensor, rows: Tensor | None) -> str | None:
    """Logarithms of probabilities are at most zero, and those of a row at most one together."""
    values = scores.detach() if rows is None else rows
    if not values.numel() or not bool(torch.isfinite(values).any()):
        return None
    tolerance = 10 * _tolerance(scores)
    if rows is None:
        is_too_much = float(values.max()) > tolerance
    else:
        is_too_much = float(rows.logsumexp(-1).median()) > tolerance
    if not is_too_much:
        return None
    within = bool((values >= 0).all()) and bool((values <= 1 + tolerance).all())
    return PROBABILITIES if within else LOGITS


def _made_by(scores: Tensor) -> bool:
    """Whether a softmax or a sigmoid made these values, and nothing has changed them since."""
    node: Any = scores.grad_fn
    for _ in range(_FAR):
        if node is None:
            return False
        name = node.name()
        if name.startswith(("SoftmaxBackward", "SigmoidBackward")):
            return True
        if not any(name.startswith(kept) for kept in _KEEPING) or not node.next_functions:
            return False
        node = node.next_functions[0][0]
    return False
