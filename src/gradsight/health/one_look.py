"""One look at a model's gradients, and the verdict on them."""

from dataclasses import replace
from math import nan

from torch import nn

from gradsight.core.group import rank
from gradsight.core.parameters import check_module, named_parameters
from gradsight.errors import UsageError
from gradsight.health.judge import Judge
from gradsight.health.subject import subject_of
from gradsight.measure.rank_table import norms_now
from gradsight.values.first_step import label_note
from gradsight.values.health_report import HealthReport, ParameterCounts, make_report
from gradsight.values.measured import MeasuredStep, Norms
from gradsight.values.scaling import scaler_note
from gradsight.values.steps import Step
from gradsight.values.whole_numbers import whole_number


def check_gradient_health(model: nn.Module, step: int = 0, quiet: bool = False) -> HealthReport:
    """Judge the gradients that are in place now: after backward, before clipping and the optimizer.

    One look knows norms, NaN, Inf and zeros, of each parameter and in all; trends and wiring need a
    run (`gradsight.watch`). Under FSDP2 every rank must call it; norms are those of whole
    parameters. The first rank prints each parameter with a NaN, and the line of the report.

    model: a module whose gradients are in place.
    step: the number of the step, for the report.
    quiet: whether to print nothing.
    """
    check_module(model)
    step = whole_number(step, "step")
    parameters = named_parameters(model)
    if not parameters:
        raise UsageError(f"{type(model).__name__} has no parameters, and so no gradients")
    rows = [row for row, named in enumerate(parameters) if named.tensor.grad is not None]
    norms = norms_now([parameters[row].tensor for row in rows])
    judge = Judge(subject_of(model, parameters, ()))
    measured = MeasuredStep(Step(step, 0.0, total_norm=norms.total), tuple(rows), norms)
    judge.observe(measured, patient=False)
    report = verdict_of(judge, steps=1)
    if not quiet and rank() == 0:
        for name in judge.window.named(_with_nan(measured)):
            print(f"  NaN gradient in: {name}")
        print(report)
    return report


def verdict_of(judge: Judge, steps: int) -> HealthReport:
    """The report on the last step that was measured, and on all that a judge has found."""
    window = judge.window
    look = window.last_look
    number = window.step.step
    norms: Norms | None = None
    total = nan
    if look is not None and look.norms is not None:
        number = look.step.step
        norms = look.norms
        total = norms.total
    findings = judge.findings()
    report = make_report(number, total, _counts(norms), findings, judge.abstentions(), steps)
    left_out = list(window.left_out) if "scale" in window.signals else []
    notes = (
        scaler_note(left_out, window.step.step, findings),
        label_note(window.label_share),
    )
    return replace(report, notes=tuple(note for note in notes if note is not None))


def _with_nan(measured: MeasuredStep) -> list[int]:
    """The parameters whose gradient holds a NaN."""
    if measured.norms is None or measured.norms.counts is None:
        return []
    nan_counts = measured.norms.counts[0]
    return [row for row, count in zip(measured.rows or (), nan_counts, strict=True) if count != 0]


def _counts(norms: Norms | None) -> ParameterCounts:
    if norms is None:
        return ParameterCounts(0, 0, 0, 0)
    with_nan = with_inf = 0
    if norms.counts is not None:
        with_nan = int((norms.counts[0] != 0).sum())
        with_inf = int((norms.counts[1] != 0).sum())
    return ParameterCounts(with_nan, with_inf, int((norms.l2 == 0).sum()), len(norms.l2))
