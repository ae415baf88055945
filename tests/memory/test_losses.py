"""Predicted peaks of steps that end in a loss of torch.nn.functional, against measured ones."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradsight import predict_peak_memory
from memory.measured_step import measured

ROWS = 128
CLASSES = 96
REDUCTIONS = ("mean", "sum", "none")

Loss = Callable[..., torch.Tensor]
Target = Callable[[], torch.Tensor]


def numbers() -> torch.Tensor:
    return torch.randn(ROWS, CLASSES)


def probabilities() -> torch.Tensor:
    return torch.rand(ROWS, CLASSES)


def classes() -> torch.Tensor:
    return torch.arange(ROWS) % CLASSES


def signs() -> torch.Tensor:
    return torch.ones(ROWS, CLASSES)


def one_sign_per_row() -> torch.Tensor:
    return torch.ones(ROWS)


def many_classes() -> torch.Tensor:
    """Return the classes of each row, ended by -1."""
    rows = torch.full((ROWS, CLASSES), -1)
    rows[:, :2] = torch.tensor([3, 0])
    return rows


def sequences() -> torch.Tensor:
    return torch.ones(ROWS // 16, 5, dtype=torch.long)


def ctc(out: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    steps = out.view(16, ROWS // 16, CLASSES).log_softmax(-1)
    lengths = torch.full((ROWS // 16,), 16), torch.full((ROWS // 16,), 5)
    return F.ctc_loss(steps, target, *lengths, **options)


def linear_cross_entropy(out: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.linear_cross_entropy(out, torch.ones(20, CLASSES), target % 20, **options)


def weighted(loss: Loss, **made: Callable[[], torch.Tensor]) -> Loss:
    """Return the loss with tensors among its options, made in each step."""

    def fn(out: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
        return loss(out, target, **{name: make() for name, make in made.items()}, **options)

    return fn


def of_logs(loss: Loss) -> Loss:
    return lambda out, target, **options: loss(out.log_softmax(-1), target, **options)


def of_sigmoid(loss: Loss) -> Loss:
    return lambda out, target, **options: loss(out.sigmoid(), target, **options)


def of_pairs(loss: Loss) -> Loss:
    return lambda out, target, **options: loss(out, out.flip(0), target, **options)


# The first element of a name is the function of torch.nn.functional.
LOSSES: dict[str, tuple[Loss, Target, dict[str, Any]]] = {
    "l1_loss": (F.l1_loss, numbers, {}),
    "l1_loss, weight": (weighted(F.l1_loss, weight=probabilities), numbers, {}),
    "mse_loss": (F.mse_loss, numbers, {}),
    "mse_loss, weight": (weighted(F.mse_loss, weight=probabilities), numbers, {}),
    "smooth_l1_loss": (F.smooth_l1_loss, numbers, {}),
    "smooth_l1_loss, beta 0": (F.smooth_l1_loss, numbers, {"beta": 0.0}),
    "huber_loss": (F.huber_loss, numbers, {"delta": 0.5}),
    "huber_loss, weight": (weighted(F.huber_loss, weight=probabilities), numbers, {}),
    "binary_cross_entropy": (of_sigmoid(F.binary_cross_entropy), probabilities, {}),
    "binary_cross_entropy, weight": (
        weighted(of_sigmoid(F.binary_cross_entropy), weight=probabilities),
        probabilities,
        {},
    ),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, probabilities, {}),
    "binary_cross_entropy_with_logits, pos_weight": (
        weighted(F.binary_cross_entropy_with_logits, pos_weight=lambda: torch.ones(CLASSES)),
        probabilities,
        {},
    ),
    "cross_entropy": (F.cross_entropy, classes, {}),
    "cross_entropy, smoothed": (F.cross_entropy, classes, {"label_smoothing": 0.1}),
    "cross_entropy, probabilities": (F.cross_entropy, probabilities, {}),
    "cross_entropy, weight": (
        weighted(F.cross_entropy, weight=lambda: torch.ones(CLASSES)),
        classes,
        {},
    ),
    "nll_loss": (of_logs(F.nll_loss), classes, {}),
    "linear_cross_entropy": (linear_cross_entropy, classes, {}),
    "ctc_loss": (ctc, sequences, {"zero_infinity": True}),
    "gaussian_nll_loss": (
        weighted(F.gaussian_nll_loss, var=lambda: torch.ones(ROWS, CLASSES)),
        numbers,
        {"full": True},
    ),
    "poisson_nll_loss": (F.poisson_nll_loss, probabilities, {}),
    "poisson_nll_loss, full": (F.poisson_nll_loss, probabilities, {"full": True}),
    "kl_div": (of_logs(F.kl_div), probabilities, {}),
    "kl_div, log_target": (of_logs(F.kl_div), numbers, {"log_target": True}),
    "hinge_embedding_loss": (F.hinge_embedding_loss, signs, {}),
    "soft_margin_loss": (F.soft_margin_loss, signs, {}),
    "multi_margin_loss": (F.multi_margin_loss, classes, {}),
    "multilabel_margin_loss": (F.multilabel_margin_loss, many_classes, {}),
    "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, probabilities, {}),
    "margin_ranking_loss": (of_pairs(F.margin_ranking_loss), signs, {}),
    "cosine_embedding_loss": (of_pairs(F.cosine_embedding_loss), one_sign_per_row, {}),
    "triplet_margin_loss": (of_pairs(F.triplet_margin_loss), numbers, {"swap": True}),
    "triplet_margin_with_distance_loss": (
        of_pairs(F.triplet_margin_with_distance_loss),
        numbers,
        {},
    ),
}


FIRST_TIER = {("cross_entropy", "adamw"), ("mse_loss", None)}
CASES = [
    pytest.param(name, optimizer, marks=() if (name, optimizer) in FIRST_TIER else pytest.mark.slow)
    for name in LOSSES
    for optimizer in (None, "adamw")
]


def test_every_loss_of_torch_is_in_the_table() -> None:
    public = {name: fn for name, fn in vars(F).items() if callable(fn) and name[0] != "_"}
    with_reduction = {
        name
        for name, fn in public.items()
        if inspect.isfunction(fn) and "reduction" in inspect.signature(fn).parameters
    }
    assert {name.split(",")[0] for name in LOSSES} == with_reduction


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_predicted_is_measured(name: str, optimizer: str | None) -> None:
    fn, target, options = LOSSES[name]
    predicted = {}
    found = {}
    for reduction in (*REDUCTIONS, *(["batchmean"] if name.startswith("kl_div") else [])):

        def loss_fn(model: nn.Module, batch: Any, reduction: str = reduction) -> torch.Tensor:
            loss = fn(model(batch[0]), batch[1], reduction=reduction, **options)
            return loss.mean() if reduction == "none" else loss

        def build(loss_fn: Loss = loss_fn) -> tuple[Any, ...]:
            return nn.Linear(8, CLASSES), (torch.randn(ROWS, 8), target()), loss_fn

        use = predict_peak_memory(build, optimizer=optimizer)
        assert use.assumptions == ()
        predicted[reduction] = use.peak_bytes
        found[reduction] = measured(build, optimizer=optimizer)
    assert predicted == found
