"""One step's way from backward to the record: a straight line, told at torch's moments.

    gradients ready -> measured -> one finished step -> judged -> explained -> written

What is handed on is a frozen value. Findings are returned, not told.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.problems import Problems
from gradsight.dump.under_watch import MadeStep, WatchedDumps
from gradsight.health.early_findings import DumpDecision, Look
from gradsight.health.health import Health
from gradsight.incidents.recorder import FlightRecorder
from gradsight.session.readings import GradientReading
from gradsight.session.signals import TrainingSignals
from gradsight.session.step_builder import StepBuilder
from gradsight.values.findings import Finding
from gradsight.values.health_report import Abstention
from gradsight.values.measured import MeasuredStep, Norms, RankComparison, StepSignals
from gradsight.values.steps import NO_GRADIENT


class Output(Protocol):
    """Where finished steps go."""

    def write(self, measured: MeasuredStep, findings: Sequence[Finding]) -> None:
        """One step, and every finding that is new or has changed."""

    def finish(self, findings: Sequence[Finding], abstained: Sequence[Abstention]) -> None:
        """The run is over: the last word of its findings, and the checks that could not judge."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step that has been made already."""

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """A number that is not of an optimizer step, but of whatever the caller counts."""


@dataclass(frozen=True, slots=True)
class WatchedInstruments:
    """What looks at the steps of a watched run; None is switched off."""

    health: Health | None
    signals: TrainingSignals | None
    """What the judge wants to know beside gradients."""
    incidents: FlightRecorder | None
    dumps: WatchedDumps | None


class StepLine:
    """Takes a step through all instruments and to all outputs."""

    def __init__(
        self,
        builder: StepBuilder,
        instruments: WatchedInstruments,
        outputs: Sequence[Output],
        problems: Problems,
        manual: bool,
    ) -> None:
        """`manual`: no optimizer is watched, so nothing is known of an update to come."""
        self.builder = builder
        self._health = instruments.health
        self._signals = instruments.signals
        self._incidents = instruments.incidents
        self._dumps = instruments.dumps
        self._early = None if instruments.health is None else instruments.health.early
        self._decision = DumpDecision()
        self._outputs = outputs
        self._problems = problems
        self._manual = manual
        self.has_failed = False
        """Whether a fault of ours has ended the looking."""
        self.has_stepped = False
        """Whether any step was made since the run was opened."""
        self._judges = instruments.health is not None
        self._last: Norms | None = None
        """The norms at the last look of the step under way, where they have arrived already."""
        self._factor = 1.0
        """The scaler's factor that was in the gradients then."""

    # The moments of a step.

    def gradients_ready(
        self, rows: Sequence[int], scaler: torch.amp.GradScaler | None, together: bool
    ) -> None:
        """The gradients of these parameters are true now.

        A scaler's factor is in them if one is given. `together`: every rank has come to this look.
        """
        reading = self.builder.gradients_ready(rows, scaler)
        norms = None if reading is None else reading.known
        # Copied now: clipping and the optimizer will have changed it by the time it is judged.
        if self._dumps is not None:
            if reading is not None and together:
                self._decide(reading, scaler is not None, self._dumps.is_wanted)
            suspicion = self._decision.suspicion
            self._dumps.gradients_ready(self.builder.step, scaler, suspicion, self._decision.wanted)
        if self._incidents is None or reading is None or norms is None:
            return
        self._factor = reading.factor()
        self._last = norms.divided_by(self._factor)
        if norms.counts is None:
            self._incidents.gradients_are_finite()
        elif not moments.inside_backward():
            code = self._not_finite(self._last, self._incidents.loss, scaler is not None)
            if code is not None:
                self._incidents.not_finite(self.builder.step, code, self._factor)

    def _decide(self, reading: GradientReading, scaled: bool, wanted: bool) -> None:
        """Whether this look is dumped for what will be found of it, or was found before."""
        if self._early is None or reading.known is None:
            return
        norms = reading.known.divided_by(reading.factor())
        loss = None if self._signals is None else self._signals.loss
        look = Look(reading.rows, norms, scaled, loss)
        self._decision = self._early.decide(look, wanted)

    def _not_finite(self, norms: Norms, loss: Tensor | None, scaled: bool) -> str | None:
        """The code under which the judge will find this gradient."""
        if self._health is None:
            return None
        loss_is_finite = loss is None or bool(torch.isfinite(loss.detach()).all())
        return self._health.alarm.not_finite(norms, scaler_settles=scaled and loss_is_finite)

    def before_update(self, rows: Sequence[int], scaler: torch.amp.GradScaler | None) -> None:
        """The optimizer of these parameters is about to use their gradients.

        They are still scaled if a scaler is given.
        """
        used = self.builder.before_update(rows, scaler)
        if used is None or self._incidents is None or self._health is None:
            return
        reading, clip = used
        if reading.known is None:
            return
        norms = reading.known.divided_by(reading.factor())
        code = self._health.alarm.too_large(norms, clip)
        if code is not None:
            self._incidents.too_large(self.builder.step, code, reading.factor())

    def after_update(
        self,
        rows: Sequence[int],
        optimizer: Optimizer | None,
        scaled: bool,
        skipped: bool | Tensor,
    ) -> None:
        """It has stepped, or was skipped.

        `rows` were looked at; `scaled`: a scaler's factor was in them then.
        """
        self.builder.after_update(rows, optimizer, scaled, skipped)

    def end_step(self, gradient: str) -> None:
        """The step is made, and `gradient` says what its gradients were."""
        self.has_stepped = True
        step = self.builder.step
        signals = StepSignals()
        loss: Tensor | None = None
        comparisons: Sequence[RankComparison] = ()
        if self._signals is not None:
            signals, loss = self._signals.take()
        if self._health is not None:
            comparisons = self._health.compare_ranks(step)
        self._end_incidents(step)
        made = MadeStep(step, gradient)
        if self._dumps is not None and self._dumps.is_staged:
            made = replace(made, clip_coef=self.builder.clip_coefficient())
        finished = self.builder.end_step(gradient, signals, loss, comparisons)
        for measured in finished:
            self._finish(measured)
        self._end_dumps(made, finished)

    def _end_dumps(self, made: MadeStep, finished: Sequence[MeasuredStep]) -> None:
        """Write what was copied; what was found only now is dumped as it was left, if at all."""
        self._decision = DumpDecision()
        if self._early is not None:
            self._early.end_step()
        if self._dumps is None:
            return
        if self._dumps.is_wanted and not self._dumps.is_staged:
            for measured in finished:
                if measured.step.step == made.step:
                    remaining = self.builder.remaining_share(measured)
                    clip = measured.step.clip_coef
                    made = replace(made, remaining=remaining, clip_coef=clip)
        self._dumps.step_made(made)

    def _end_incidents(self, step: int) -> None:
        norms = self._last
        self._last = None
        if self._incidents is None:
            return
        if self._health is not None and norms is not None:
            if self._manual:
                code = self._health.alarm.too_large(norms, None)
                if code is not None:
                    self._incidents.too_large(step, code, self._factor)
            self._health.alarm.end_step(norms)
        self._incidents.end_step()

    def failed(self, error: Exception) -> None:
        """A fault of ours: training goes on without us."""
        self.has_failed = True
        self.stop()
        name = type(error).__name__
        self._problems.report(
            "capture", f"Gradsight stopped looking at gradients: {name}: {error} ({_place(error)})"
        )

    def stop(self, patience: float = 0.0) -> None:
        """Look at nothing more; wait so many seconds for what other ranks are still sending."""
        if self._signals is not None:
            self._signals.stop()
        if self._health is not None:
            self._health.stop(patience)
        if self._incidents is not None:
            self._incidents.look_away()

    # A finished step.

    def _finish(self, measured: MeasuredStep) -> None:
        self._problems.step = measured.step.step
        if measured.step.gradient == NO_GRADIENT:
            self._problems.report(
                "no-gradient",
                f"step {measured.step.step}: no parameter of the model has a gradient. The record "
                "says so. Look after backward() and before zero_grad(), at the model that is being "
                "trained.",
            )
        # Each finding goes through once and is written once, with all that is known of it.
        findings = self._judge(measured)
        if self._incidents is not None:
            findings = self._incidents.explain(measured, findings)
        if self._dumps is not None:
            self._dumps.judged(measured.step.step, findings)
        for output in self._outputs:
            output.write(measured, findings)

    def _judge(self, measured: MeasuredStep) -> list[Finding]:
        """The findings of a step. A fault of the judge's own ends the judging, not the record."""
        if self._health is None or not self._judges:
            return []
        try:
            return self._health.judge(measured)
        except Exception as error:
            self._judges = False
            name = type(error).__name__
            self._problems.report("judge", f"Gradsight stopped judging: {name}: {error}")
            return []

    def flush(self) -> None:
        """Wait for everything that is on its way, and finish it."""
        for measured in self.builder.flush():
            self._finish(measured)

    def finish_judging(self) -> None:
        """The run is over: write the last word of every finding."""
        if self._health is None:
            return
        findings = self._health.finish()
        if self._incidents is not None:
            findings = self._incidents.with_causes(findings)
        for output in self._outputs:
            output.finish(findings, self._health.abstentions())


def _place(error: Exception) -> str:
    """Where an error of ours came from, for the message."""
    trace = error.__traceback__
    if trace is None:
        return "unknown place"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
