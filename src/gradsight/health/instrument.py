"""Composes measure and judge: one look at a model's gradients, and the judge of a watched run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from gradsight.core.group import ProcessGroup, shared_group
from gradsight.core.parameters import Named, named_parameters
from gradsight.core.shards import are_spread, counts_here, is_sharded, local_part
from gradsight.errors import UsageError
from gradsight.health.judge import Judge
from gradsight.health.ranks import Ranks
from gradsight.health.window import Closer, Floats, Observed, RankLook, Subject
from gradsight.measure.histogram import COLUMNS
from gradsight.measure.norms import Norms, NormsLook, look_closer, merge_ranks, summed_up
from gradsight.measure.units import UnitLife
from gradsight.measure.update import squares_of_whole, update_ratios
from gradsight.session.optimizer_steps import check_optimizers, unwrapped
from gradsight.session.signals import Vitals
from gradsight.session.step_builder import Measured, Noted
from gradsight.store.store import Store
from gradsight.values.diagnoses import Diagnosis
from gradsight.values.findings import Finding
from gradsight.values.health_report import HealthReport, ParameterCounts, make_report
from gradsight.values.steps import Step

_FLOAT16_LEAST_EXPONENT = -14
_BIAS = 127


def check_gradient_health(model: nn.Module, step: int = 0) -> HealthReport:
    """Judge the gradients that are in place now: after backward, before clipping and before the
    optimizer steps.

    One look knows norms, NaN, Inf and zeros, of each parameter and in all; trends and wiring need a
    run (`gradsight.watch`). Under FSDP2 every rank must call it; norms are those of whole
    parameters.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    parameters = named_parameters(model)
    rows = [row for row, named in enumerate(parameters) if named.tensor.grad is not None]
    norms = _norms([parameters[row] for row in rows])
    judge = Judge(subject_of(model, parameters, ()))
    total = norms.total if rows else 0.0
    observed = Observed(
        Step(step, 0.0, total_norm=total), rows, norms.l2, norms.max_abs, norms.counts, total
    )
    judge.observe(observed, patient=False)
    return _report(judge, steps=1)


def _norms(found: Sequence[Named]) -> Norms:
    """Norms of whole gradients, merged over ranks where they are spread."""
    parts = [local_part(named.tensor.grad) for named in found if named.tensor.grad is not None]
    norms = look_closer(parts, NormsLook(parts).read())
    group = shared_group() if are_spread([named.tensor for named in found]) else None
    if group is None:
        return norms
    zeros = np.zeros(len(parts))
    table = np.stack(
        [norms.l2, norms.max_abs, *(norms.counts or (zeros, zeros)), zeros + 1], axis=1
    )
    table[[not counts_here(named.tensor) for named in found], :4] = 0
    table = merge_ranks(np.stack(group.start_gather(table).wait()))
    merged = summed_up(table[:, 0], table[:, 1])
    if merged.counts is not None:
        merged.counts = (table[:, 2], table[:, 3])
    return merged


def subject_of(
    model: nn.Module, parameters: Sequence[Named], optimizers: Sequence[Optimizer]
) -> Subject:
    """What a judge may know of a model before any gradient is seen."""
    owners = {
        id(tensor): type(module).__name__
        for module in model.modules()
        for tensor in module._parameters.values()
    }
    described = [named.describe() for named in parameters]
    return Subject(
        names=[parameter.name for parameter in described],
        shapes=[parameter.shape for parameter in described],
        trainable=[parameter.trainable for parameter in described],
        kinds=[owners.get(id(named.tensor), "") for named in parameters],
        half=[parameter.dtype == "float16" for parameter in described],
        memberships=_memberships(parameters, optimizers) if optimizers else None,
    )


def _memberships(parameters: Sequence[Named], optimizers: Sequence[Any]) -> list[int]:
    counts: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                counts[id(tensor)] = counts.get(id(tensor), 0) + 1
    return [counts.get(id(named.tensor), 0) for named in parameters]


class Health:
    """The judge of a watched run, and what it needs: vitals, closer looks, a place for findings."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[Named], optimizers: Any, settings: object
    ) -> None:
        self._first_step = 0
        self._model, self._parameters = model, parameters
        self._ranks: Ranks | None = None
        self._late: list[RankLook] = []
        self._optimizers = [unwrapped(optimizer) for optimizer in check_optimizers(optimizers)]
        self._store: Store | None = None
        self.on_finding: Sequence[Callable[[Finding], None]] = ()
        """Who else wants to hear of every new or changed finding."""
        self._causes: dict[str, tuple[Diagnosis | None, str | None]] = {}
        self._judge = Judge(
            subject_of(model, parameters, self._optimizers), settings, self._on_finding
        )
        subject = self._judge.window.subject
        whole = [row for row in subject.matrices if not is_sharded(parameters[row].tensor)]
        self.units = UnitLife([row for row in whole if subject.trainable[row]])
        self.vitals = Vitals(model, self._optimizers)
        self.elsewhere: list[Optimizer] = []
        """Optimizers that may hold some of these parameters, but are watched elsewhere."""

    def begin(self, first_step: int, store: Store | None) -> None:
        """The number of the first step, and where findings are kept."""
        self._first_step, self._store = first_step, store

    def compare_ranks(self, group: ProcessGroup, report: Callable[[str, str], None]) -> None:
        """Look at what every rank brings to the common gradient. To be called on all of them."""
        tensors = [named.tensor for named in self._parameters]
        self._ranks = Ranks(self._model, tensors, group, self.looks_closer, report)
        self._ranks.begin(self._first_step)

    def stop(self, patience: float = 0.0) -> None:
        """Take every hook away, and wait so many seconds for what other ranks are still sending."""
        self.vitals.stop()
        if self._ranks is not None:
            self._late += self._ranks.stop(patience)

    def looks_closer(self, step: int) -> bool:
        """Early and often at first, then every 50 steps: most faults of a set-up show at once."""
        made = step - self._first_step
        return made % 50 == 0 or made in (1, 2, 4, 8, 16, 24, 32)

    def notes(self, step: int) -> Noted:
        """What was noticed in the step that has just ended."""
        vitals = self.vitals
        ranks = self._ranks.end_step(step) if self._ranks is not None else ()
        loss, guess = vitals.take_loss(), vitals.take_guess()
        return Noted(loss, vitals.uncleared, vitals.alike, vitals.half, vitals.fixed, guess, ranks)

    def __call__(self, measured: Measured) -> None:
        """Judge one measured step."""
        step, norms, notes = measured.step, measured.norms, measured.notes
        everything = len(measured.rows) == len(self._parameters)
        loss = measured.loss if measured.loss is not None else step.loss
        if self._optimizers and self._judge.window.steps_seen % 50 == 0:
            self._judge.window.subject.memberships = _memberships(
                self._parameters, [*self._optimizers, *self.elsewhere]
            )
        observed = Observed(
            step, None if everything else measured.rows, loss=loss, uncleared=notes.uncleared
        )
        observed.alike, observed.half, observed.fixed, observed.guess = (
            notes.alike,
            notes.half,
            notes.fixed,
            notes.guess,
        )
        if norms is not None:
            observed.l2, observed.max_abs, observed.counts, observed.total = (
                norms.l2,
                norms.max_abs,
                norms.counts,
                norms.total,
            )
        if measured.histogram_counters is not None:
            observed.closer = self._closer(measured)
        self._judge.observe(observed)
        for look in notes.ranks:
            self._judge.compare(look)

    def report(self) -> HealthReport:
        """The verdict so far."""
        report = _report(self._judge, self._judge.window.steps_seen)
        return replace(
            report, findings=tuple(self._explained(finding) for finding in report.findings)
        )

    def limits(self) -> dict[str, Mapping[str, Any]]:
        """The thresholds of every check that is not silenced, by code."""
        return self._judge.limits()

    def finding(self, code: str) -> Finding | None:
        """What was found under a code so far."""
        return next((finding for finding in self._judge.findings() if finding.code == code), None)

    def explain(self, code: str, diagnosis: Diagnosis | None, incident: str | None) -> None:
        """A finding's first incident was diagnosed, or written: the record and the report say so."""
        found = self.finding(code)
        if found is not None and code not in self._causes:
            self._causes[code] = (diagnosis, incident)
            if self._store is not None:
                self._store.add_finding(self._explained(found))

    def _explained(self, finding: Finding) -> Finding:
        diagnosis, incident = self._causes.get(finding.code, (None, None))
        return replace(finding, diagnosis=diagnosis, incident=incident)

    def finish(self) -> None:
        """The run is over: the last word of every finding, and which checks could not judge."""
        for look in self._late:
            self._judge.compare(look)
        self._judge.finish()
        if self._store is not None:
            for each in self._judge.abstentions():
                value = {"code": each.code, "name": each.name, "reason": each.reason}
                self._store.add_record("abstention", each.code, self._first_step, value)

    def _on_finding(self, finding: Finding) -> None:
        if self._store is not None:
            self._store.add_finding(self._explained(finding))
        for tell in self.on_finding:
            tell(finding)

    def _closer(self, measured: Measured) -> Closer:
        """Shares and ratios of a closer look, spread over all parameters."""
        assert measured.histogram_counters is not None
        counters = measured.histogram_counters
        sampled = np.maximum(counters[:, COLUMNS], 1)
        table = counters[:, :COLUMNS].reshape(len(counters), 2, 256, 2)
        zero = table[:, :, 0, 1].sum(axis=1) / sampled
        tiny = (
            table[:, :, 1 : _BIAS + _FLOAT16_LEAST_EXPONENT].sum(axis=(1, 2, 3))
            + table[:, :, 0, 0].sum(axis=1)
        ) / sampled
        ratio = weight = np.full(len(counters), np.nan)
        if measured.update_sums is not None and measured.update_sums.any():
            ratio, weight = (
                update_ratios(measured.update_sums)[0],
                squares_of_whole(measured.update_sums),
            )
        dead = self._spread([], np.zeros(0))
        for row, share in measured.dead_shares.items():
            dead[row] = share
        rows = measured.rows
        shares = (self._spread(rows, zero), self._spread(rows, tiny), dead)
        return Closer(
            measured.step.step, self._spread(rows, ratio), *shares, self._spread(rows, weight)
        )

    def _spread(self, rows: list[int], values: Floats) -> Floats:
        result = np.full(len(self._parameters), np.nan)
        result[rows] = values
        return result


def _report(judge: Judge, steps: int) -> HealthReport:
    now = judge.window.now
    nan = inf = zero = size = 0
    if now.l2 is not None:
        size, zero = len(now.l2), int((now.l2 == 0).sum())
    if now.counts is not None:
        nan, inf = (int((counts != 0).sum()) for counts in now.counts)
    counts = ParameterCounts(nan, inf, zero, size)
    return make_report(
        now.step.step, now.total, counts, judge.findings(), judge.abstentions(), steps
    )
