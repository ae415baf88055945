"""gradsight.preflight: what one batch decides of a model and its loss, before any training."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradsight.core.beside import beside_training
from gradsight.core.parameters import check_module, named_parameters, type_name, unwrapped
from gradsight.errors import UsageError
from gradsight.first_step.one_batch import look_at_batch
from gradsight.health.judge import Judge, checks_at_work
from gradsight.health.one_look import verdict_of
from gradsight.health.subject import subject_of
from gradsight.memory.workload import model_loss, refused_call
from gradsight.values.findings import FIRST_STEP, family_of
from gradsight.values.first_step import StepPasses
from gradsight.values.health_report import HealthReport
from gradsight.values.measured import MeasuredStep, Norms, StepSignals
from gradsight.values.steps import Step

_ALWAYS = ("GS103", "GS104")
"""Beside its own: a gradient that is not finite."""
_OVERFIT_RATES = (1e-3, 1e-2)
"""Both are tried when a batch is to be learned: what one is too small for, the other may learn."""


def preflight(model: nn.Module, batch: Any, loss_fn: Any = None) -> HealthReport:
    """Find mistakes in a model and its loss that no gradient norm shows, with one batch.

    This runs the checks GS601 to GS608 and GS612 to GS614. They find positions that see later
    ones, and rows or packed documents that see each other. They find targets that are not moved
    ahead, or moved twice, samples without labels, and padding that counts. They find wrong loss
    inputs, a loss that does not depend on the input, and evaluation mode. Weights, buffers,
    gradients, generators, modes and hooks are left as they were. Checks that could not judge are
    in the report's `abstained`.

    model: the module that is to be trained, inside any wrapper.
    batch: one batch, as loss_fn takes it.
    loss_fn: loss_fn(model, batch) -> the loss that would be trained on. Without it the batch is a
      dict or a tuple of the model's arguments, and the loss is the output's `.loss`, its first
      element, or the output itself.
    """
    check_module(model)
    if loss_fn is None:
        loss_fn = model_loss
    if not callable(loss_fn):
        raise UsageError(f"loss_fn must be a function (model, batch), got {type_name(loss_fn)}")
    refusal = refused_call(loss_fn, 2)
    if isinstance(loss_fn, nn.modules.loss._Loss) or refusal:
        raise UsageError(
            "loss_fn must be a function (model, batch) -> loss, for example lambda model, batch: "
            f"criterion(model(batch[0]), batch[1]); got {type_name(loss_fn)}"
        )
    parameters = named_parameters(model)
    if not any(named.tensor.requires_grad for named in parameters):
        raise UsageError(f"{type(model).__name__} has no parameters that learn")
    look = look_at_batch(model, batch, loss_fn, [named.tensor for named in parameters])
    rows = tuple(row for row, each in enumerate(look.gradients) if each is not None)
    norms = _norms([each for each in look.gradients if each is not None])
    passes = StepPasses(evaluating=look.evaluating)
    signals = StepSignals(loss=look.loss, first=look.first, passes=passes)
    chosen = [each for each in checks_at_work(True) if each.check.code in preflight_codes()]
    judge = Judge(subject_of(model, parameters, ()), chosen)
    judge.observe(MeasuredStep(Step(0, 0.0), rows, norms, signals=signals), patient=False)
    return verdict_of(judge, steps=1)


def preflight_codes() -> set[str]:
    """The codes that a first step decides."""
    codes = [each.check.code for each in checks_at_work(True)]
    return {code for code in codes if family_of(code) == FIRST_STEP or code in _ALWAYS}


def _norms(gradients: list[Tensor]) -> Norms:
    """Of gradients that are nowhere kept."""
    l2 = np.zeros(len(gradients))
    max_abs = np.zeros(len(gradients))
    nans = np.zeros(len(gradients))
    infinite = np.zeros(len(gradients))
    for place, gradient in enumerate(gradients):
        values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
        wide = values.float()
        if not wide.numel():
            continue
        l2[place] = float(wide.norm())
        max_abs[place] = float(wide.abs().max())
        nans[place] = int(torch.isnan(wide).sum())
        infinite[place] = int(torch.isinf(wide).sum())
    is_finite = not nans.any() and not infinite.any()
    counts = None if is_finite else (nans, infinite)
    return Norms(l2, max_abs, counts, float(np.sqrt((l2**2).sum())))


def overfit_one_batch(
    model: nn.Module, batch: Any, loss_fn: Any, steps: int
) -> tuple[float, float]:
    """The loss of the batch before, and the least that Adam comes to on copies of the model."""
    inner = unwrapped(model)
    first = float("nan")
    best = float("inf")
    for rate in _OVERFIT_RATES:
        with beside_training(inner):
            pupil = copy.deepcopy(inner)
            learning = [each for each in pupil.parameters() if each.requires_grad]
            optimizer = torch.optim.Adam(learning, lr=rate)
            for number in range(steps):
                loss = loss_fn(pupil, batch)
                if number == 0:
                    first = float(loss.detach())
                best = min(best, float(loss.detach()))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            best = min(best, float(loss_fn(pupil, batch).detach()))
    return first, best
