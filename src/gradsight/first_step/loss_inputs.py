"""What a loss function was given, read from its values and from the operation that made them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.values.first_step import ConstantLoss, CountedLabels, FedLoss

_ROWS = 256
"""Rows of scores that are looked at."""
_KEEPING = (
    "View", "Reshape", "UnsafeView", "ToCopy", "Transpose", "Permute", "Squeeze", "Unsqueeze",
    "Clone", "Slice", "Select", "Expand", "TBackward", "Alias", "Contiguous", "AsStrided", "Index",
    "Cat", "Stack", "Movedim",
)  # fmt: skip
"""Operations that move entries and leave their values alone."""
_ENTRIES = 4096
"""Entries of a loss's two sides that are compared."""
_FURTHER = 24
_COMPARING = frozenset({F.kl_div, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss})
_FAR = 12
LOGITS = "logits"
PROBABILITIES = "probabilities"
LOG_PROBABILITIES = "log-probabilities"


@dataclass(frozen=True, slots=True)
class Cut:
    """What was kept of one dimension of the scores."""

    size: int
    """How long the dimension was."""
    start: int
    end: int


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


def constant_loss(
    function: Any, scores: Tensor, target: Tensor, options: Mapping[str, Any], place: str | None
) -> ConstantLoss | None:
    """What makes the gradient of this loss zero; None where nothing is known to."""
    is_classifying = function in (F.cross_entropy, F.nll_loss)
    softmax = _softmax_of(scores)
    over_one = softmax is not None and _classes(softmax) == 1
    if over_one or (
        is_classifying and scores.dim() and scores.shape[min(1, scores.dim() - 1)] == 1
    ):
        return ConstantLoss(function.__name__, "one class", place)
    if function in _COMPARING and scores.shape == target.shape and scores.numel():
        given, wanted = _some(scores), _some(target)
        # Zeros that are compared with zeros are not copies: rewards that have not come yet.
        is_varied = bool((given != given[0]).any())
        if function is F.kl_div:
            given = given.exp()
            wanted = wanted.exp() if options.get("log_target", False) else wanted
        if is_varied and torch.allclose(given, wanted, rtol=1e-4, atol=1e-6):
            return ConstantLoss(function.__name__, "equal", place)
    return None


def _some(values: Tensor) -> Tensor:
    """Some of the entries, the same ones of every tensor of this size."""
    flat = values.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _ENTRIES)].float()


def _classes(softmax: Any) -> int:
    """How many entries a node of a softmax has normalised together."""
    shape = softmax._input_metadata[0].shape
    return int(shape[_signed(softmax._saved_dim)])


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
    return _maker(scores, ("SoftmaxBackward", "SigmoidBackward")) is not None


def _softmax_of(scores: Tensor) -> Any:
    """The node of the softmax, or of its logarithm, that made these values; None without one."""
    return _maker(scores, ("SoftmaxBackward", "LogSoftmaxBackward"))


def cuts_of(scores: Tensor) -> tuple[Cut, ...]:
    """What was cut off these scores since a layer made them."""
    node: Any = scores.grad_fn
    cuts = []
    for _ in range(_FURTHER):
        if node is None or not node.name().startswith(_KEEPING):
            break
        if node.name().startswith("SliceBackward"):
            sizes = node._saved_self_sym_sizes
            dim, start, end = (
                _signed(n) for n in (node._saved_dim, node._saved_start, node._saved_end)
            )
            size = int(sizes[dim])
            cuts.append(Cut(size, *(n + size if n < 0 else min(n, size) for n in (start, end))))
        node = node.next_functions[0][0] if node.next_functions else None
    return tuple(cuts)


def _signed(number: int) -> int:
    """Return the signed number: autograd stores negative numbers as large unsigned ones."""
    return number - 2**64 if number >= 2**63 else number


def _maker(scores: Tensor, names: tuple[str, ...]) -> Any:
    """The node with one of these names that made these values; None where others have since."""
    node: Any = scores.grad_fn
    for _ in range(_FAR):
        if node is None:
            return None
        name = node.name()
        if name.startswith(names):
            return node
        if not any(name.startswith(kept) for kept in _KEEPING) or not node.next_functions:
            return None
        node = node.next_functions[0][0]
    return None
