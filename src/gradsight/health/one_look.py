"""One look at a model's gradients, and the verdict on them."""

from torch import nn

from gradsight.core.parameters import named_parameters
from gradsight.errors import UsageError
from gradsight.health.judge import Judge
from gradsight.health.subject import subject_of
from gradsight.measure.rank_table import norms_now
from gradsight.values.health_report import HealthReport, ParameterCounts, make_report
from gradsight.values.measured import MeasuredStep
from gradsight.values.steps import Step


def check_gradient_health(model: nn.Module, step: int = 0) -> HealthReport:
    """Judge the gradients that are in place now: after backward, before clipping and the optimizer.

    One look knows norms, NaN, Inf and zeros, of each parameter and in all; trends and wiring need a
    run (`gradsight.watch`). Under FSDP2 every rank must call it; norms are those of whole
    parameters.

    model: a module whose gradients are in place.
    step: the number of the step, for the report.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    parameters = named_parameters(model)
    rows = [row for row, named in enumerate(parameters) if named.tensor.grad is not None]
    norms = norms_now([parameters[row].tensor for row in rows])
    judge = Judge(subject_of(model, parameters, ()))
    measured = MeasuredStep(Step(step, 0.0, total_norm=norms.total), tuple(rows), norms)
    judge.observe(measured, patient=False)
    return verdict_of(judge, steps=1)


def verdict_of(judge: Judge, steps: int) -> HealthReport:
    """The report on the last step that a judge has seen, and on all that it has found."""
    window = judge.window
    nan = inf = zero = size = 0
    if window.norms is not None:
        size = len(window.norms.l2)
        zero = int((window.norms.l2 == 0).sum())
        if window.norms.counts is not None:
            nan = int((window.norms.counts[0] != 0).sum())
            inf = int((window.norms.counts[1] != 0).sum())
    counts = ParameterCounts(nan, inf, zero, size)
    findings = judge.findings()
    return make_report(window.step.step, window.total, counts, findings, judge.abstentions(), steps)
