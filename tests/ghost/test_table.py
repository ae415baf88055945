"""Every model of the table against the twin, and against plain training."""

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ghost.models import MODELS, UNEQUAL, Case, build, rows_of
from gradsight import GhostEngine
from gradsight.errors import GradsightWarning

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def observe(case: Case, **options: object) -> tuple[GhostEngine, Tensor]:
    """One observed training pass: the engine, and the loss."""
    engine = GhostEngine(case.model, case.loss_fn, case.validation, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradsightWarning)
        with engine.observe():
            loss = case.loss_fn(case.model, case.batch)
            loss.backward()
    return engine, loss.detach()


def gradient(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_scores(case: Case) -> Tensor:
    """<g_val, g_i> by nothing but backward passes of single samples; for losses that are means of
    the samples' own.
    """
    named = [p for p in case.model.parameters() if p.requires_grad]
    case.model.eval()

    def grads(batch: object) -> list[Tensor]:
        found = torch.autograd.grad(case.loss_fn(case.model, batch), named, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(named, found, strict=True)]

    direction, rows = grads(case.validation), rows_of(case.batch, case.model)
    return torch.stack(
        [sum((d * g).sum() for d, g in zip(direction, grads(row), strict=True)) for row in rows]
    ) / len(rows)


FIRST_TIER = {"gpt2", "mixtral", "lora", "convnet", "lstm", "mlp"}


def by_tier(names: Iterable[str]) -> list[Any]:
    """Parameters for names of models, of which most are in the slow tier."""
    return [
        pytest.param(name, marks=() if name in FIRST_TIER else pytest.mark.slow) for name in names
    ]


@pytest.mark.parametrize("options", [{}, {"exact_grad": True}], ids=["fast", "exact"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", by_tier(MODELS))
def test_scores_equal_the_twins(name: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    case = build(name, dtype)
    case.model.train()
    engine, _ = observe(case, **options)
    report = engine.verify(case.batch)
    assert report.max_relative_error <= TOLERANCE[dtype], report
    assert report.passed


@pytest.mark.parametrize("name", by_tier(name for name in MODELS if name not in UNEQUAL))
def test_scores_equal_single_backward_passes(name: str) -> None:
    case = build(name)
    truth = plain_scores(case)
    engine, _ = observe(case)
    assert torch.allclose(
        engine.scores.total, truth, rtol=0, atol=float(1e-9 * truth.abs().max())
    ), (
        engine.scores.total,
        truth,
    )


@pytest.mark.parametrize("exact_grad", [False, True])
@pytest.mark.parametrize("name", by_tier(MODELS))
def test_gradient_is_plain_trainings(name: str, exact_grad: bool) -> None:
    """Dropout on: same random numbers, same loss, same gradient; the scores add up to <direction,
    gradient>.
    """
    case = build(name, torch.float32)
    case.model.train()
    torch.manual_seed(5)
    case.loss_fn(case.model, case.batch).backward()
    plain = gradient(case.model)
    case.model.zero_grad()
    torch.manual_seed(5)
    engine, _ = observe(case, exact_grad=exact_grad)
    observed = gradient(case.model)
    assert observed.keys() == plain.keys()
    noise = 1e-8 * max(
        float(grad.norm()) for grad in plain.values()
    )  # key biases have no gradient but rounding
    for parameter, grad in plain.items():
        if exact_grad:
            assert torch.equal(observed[parameter], grad), parameter
        else:
            assert (observed[parameter] - grad).norm() <= 1e-6 * grad.norm() + noise, parameter
    direction = engine._targets.directions["validation"]
    whole = sum(
        (direction[n].double() * observed[n].double()).sum() for n in observed if n in direction
    )
    assert abs(engine.scores.total.sum() - whole) <= 1e-4 * engine.scores.total.abs().sum()
