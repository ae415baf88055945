"""One step's way from backward to the record: a straight line, told at torch's moments.

    gradients ready -> measured -> one finished step -> judged -> explained -> written

What is handed on is a frozen value. Findings are returned, not told.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.guard import Guard
from gradsight.core.problems import Problems
from gradsight.core.sharing import Reduction
from gradsight.dump.under_watch import MadeStep, WatchedDumps
from gradsight.health.bad_steps import is_nan_loss
from gradsight.health.early_findings import DumpDecision, Look
from gradsight.health.health import Health
from gradsight.incidents.recorder import FlightRecorder, LateStep
from gradsight.measure.clipping import ClipReading
from gradsight.measure.host_copy import HostCopy
from gradsight.session.brake import Brake
from gradsight.session.loss_flags import LossFlags
from gradsight.session.readings import GradientReading, StepInProgress, after_doubts, arrived
from gradsight.session.signals import SeenLoss, TrainingSignals
from gradsight.session.step_builder import StepBuilder
from gradsight.values.findings import Finding
from gradsight.values.health_report import Abstention
from gradsight.values.measured import (
    MeasuredStep,
    Norms,
    RankComparison,
    RankDigests,
    StepSignals,
)
from gradsight.values.steps import NO_GRADIENT

_SEVERAL_THREADS = (
    "several threads write the gradients of one model at once, so Gradsight cannot know which "
    "gradients an optimizer uses: it counts steps and measures nothing. Give each thread its own "
    "model, or train in one thread."
)


class Output(Protocol):
    """Where finished steps go."""

    title: str
    """What a message calls it."""

    def write(self, measured: MeasuredStep, findings: Sequence[Finding]) -> None:
        """One step, and every finding that is new or has changed."""

    def finish(self, findings: Sequence[Finding], abstained: Sequence[Abstention]) -> None:
        """The run is over: the last word of its findings, and the checks that could not judge."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step that has been made already."""

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """A number of the step that is under way, or was just made."""

    def log_tracked(self, step: int, name: str, value: float) -> None:
        """A number under a count of the caller's own."""


@dataclass(frozen=True, slots=True)
class WatchedInstruments:
    """What looks at the steps of a watched run; None is switched off."""

    health: Health | None
    signals: TrainingSignals | None
    """What the judge wants to know beside gradients."""
    incidents: FlightRecorder | None
    dumps: WatchedDumps | None
    losses: LossFlags | None = None
    """Where numbers come late, losses tell first."""


class StepLine:
    """Takes a step through all instruments and to all outputs."""

    def __init__(
        self,
        builder: StepBuilder,
        instruments: WatchedInstruments,
        outputs: Sequence[Output],
        problems: Problems,
        brake: Brake | None,
        reduction: Reduction,
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
        self._problems = problems
        self._brake = brake
        self._manual = manual
        self.lock = threading.RLock()
        """Held while a step goes on its way; who holds it finds all steps so far finished."""
        self.has_stepped = False
        """Whether any step was made since the run was opened."""
        self.reduction = reduction
        # Each has a guard of its own: what fails is missing alone, and the rest is recorded. Of an
        # output even that is tried again at every step: one may have been the only bad one.
        self._judging = Guard(problems, "judge", "Gradsight stopped judging")
        self._dumping = Guard(problems, "dumps", "Gradsight stopped dumping gradients")
        self._outputs = [(output, _output_guard(output, problems)) for output in outputs]
        self._last: Norms | None = None
        """The norms at the last look of the step under way, where they have arrived already."""
        self._logged_late: deque[tuple[int, dict[str, float | HostCopy]]] = deque()
        self._losses = instruments.losses
        self._late: StepInProgress | None = None
        """The step before, where its numbers were not there when its gradient was used."""
        self._factor = 1.0
        """The scaler's factor that was in the gradients then."""

    def continue_from(self, before: "StepLine") -> None:
        """Go on where another line has ended, with other parameters."""
        self.has_stepped = before.has_stepped
        self.builder.continue_from(before.builder)

    def also_write_to(self, output: Output) -> None:
        """Hand finished steps to this one too, from now on."""
        self._outputs.append((output, _output_guard(output, self._problems)))

    # The moments of a step.

    def gradients_ready(
        self,
        rows: Sequence[int],
        scaler: torch.amp.GradScaler | None,
        together: bool,
        complete: bool = True,
        or_next: bool = False,
    ) -> None:
        """The gradients of these parameters are true now.

        A scaler's factor is in them if one is given. `together`: every rank has come to this look.
        `complete`: no other gradient was seen earlier in the step, and edited since.
        `or_next`: they may turn out to be those of the next step.
        """
        with self.lock:
            if self._dumps is not None and self._dumps.keeps_gradients:
                # Before the gradient that is kept is that of this step.
                self._finish_all(self.builder.flush())
                self._dumping.run(self._dumps.dump_kept)
            elif self._incidents is not None and self._late is not None:
                self._incidents.guard.run(self._settle_late, False)
            reading = self.builder.gradients_ready(rows, scaler, or_next)
            # Copied now: clipping and the optimizer will have changed it by the time it is judged.
            self._dumping.run(self._stage_dump, reading, scaler, together, complete)
            if self._incidents is not None and reading is not None:
                scaled = scaler is not None
                self._incidents.guard.run(self._look_for_incident, reading, scaled)

    def _stage_dump(
        self,
        reading: GradientReading | None,
        scaler: torch.amp.GradScaler | None,
        together: bool,
        complete: bool,
    ) -> None:
        dumps = self._dumps
        if dumps is None:
            return
        if reading is not None and together:
            self._decide(reading, scaler is not None, dumps.is_wanted)
        suspicion = self._decision.suspicion
        wanted = self._decision.wanted
        dumps.gradients_ready(self.builder.step, scaler, suspicion, wanted, complete)

    def _look_for_incident(self, reading: GradientReading, scaled: bool) -> None:
        """A gradient that is not finite is diagnosed while everything is as it was."""
        norms = reading.known
        incidents = self._incidents
        if norms is None or incidents is None:
            return
        self._factor = reading.factor()
        self._last = norms.divided_by(self._factor)
        if norms.counts is None:
            incidents.gradients_are_finite()
        elif not moments.inside_backward():
            code = self._not_finite(self._last, incidents.loss, scaled)
            if code is not None:
                incidents.not_finite(self.builder.step, code, self._factor)

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
        # Asked first: whether a loss is NaN has to be waited for.
        if self._health is None or norms.counts is None:
            return None
        return self._health.alarm.not_finite(norms, scaled, scaled and is_nan_loss(loss))

    def before_update(
        self,
        rows: Sequence[int],
        scaler: torch.amp.GradScaler | None,
        edited_alike: bool = True,
    ) -> ClipReading | None:
        """The optimizer of these parameters is about to use their gradients.

        They are still scaled if a scaler is given. How much of them it uses, where that may be one
        number: only if torch has `edited_alike` all of them.
        """
        with self.lock:
            if self._incidents is not None:
                self._incidents.guard.run(self._before_update, rows)
            used = self.builder.before_update(rows, scaler, edited_alike)
            if used is not None and self._incidents is not None and self._health is not None:
                self._incidents.guard.run(self._look_for_spike, *used)
        return None if used is None else used[1]

    def _before_update(self, rows: Sequence[int]) -> None:
        """Where numbers come late: what can be known before the weights change."""
        incidents = self._incidents
        if incidents is None:
            return
        # First: whoever waits for this finds the numbers of the step before there, too.
        loss_is_bad = self._losses is not None and self._losses.is_bad()
        self._settle_late()
        if loss_is_bad:
            # What was found of the steps before is written before anything else is found.
            if not self.builder.is_merged:
                self._finish_all(self.builder.flush())
            for reading in self.builder.readings_of(rows):
                if reading.known is None:
                    reading.read()
                    self._look_for_incident(reading, reading.scale is not None)
        incidents.about_to_update(self.builder.step)

    def _settle_late(self, wait: bool = True) -> None:
        """Look at the step before as it would have been looked at, had its numbers been there."""
        late = self._late
        incidents = self._incidents
        health = self._health
        if late is None or incidents is None or not (wait or late.ready()):
            return
        self._late = None
        if health is None:
            return
        for used in late.used:
            factor = used.reading.factor()
            norms = used.reading.read().divided_by(factor)
            scaled = used.reading.scale is not None
            kind: Literal["nonfinite", "spike"] = "nonfinite"
            last = incidents.calls.last
            code = self._not_finite(norms, None if last is None else last.root, scaled)
            if code is None:
                kind = "spike"
                code = health.alarm.too_large(norms, used.clip)
            if code is not None:
                incidents.was_bad(LateStep(late.number, kind, code, factor, late.was_skipped))
            health.alarm.end_step(norms)

    def _look_for_spike(self, reading: GradientReading, clip: ClipReading) -> None:
        if reading.known is None or self._incidents is None or self._health is None:
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
        edited_inside: bool = False,
    ) -> None:
        """It has stepped, or was skipped.

        `rows` were looked at; `scaled`: a scaler's factor was in them then; `edited_inside`: the
        optimizer has edited its gradients itself.
        """
        with self.lock:
            self.builder.after_update(rows, optimizer, scaled, skipped, edited_inside)

    def end_step(self, gradient: str, doubts: Sequence[HostCopy] = ()) -> None:
        """The step is made, and `gradient` says what its gradients were.

        `doubts`: flags on their way; where one is set, they were changed between passes.
        """
        with self.lock:
            self._end_step(gradient, doubts)

    def _end_step(self, gradient: str, doubts: Sequence[HostCopy]) -> None:
        self.has_stepped = True
        step = self.builder.step
        signals = StepSignals()
        seen = SeenLoss()
        comparisons: Sequence[RankComparison] = ()
        digests: Sequence[RankDigests] = ()
        if self._signals is not None:
            signals, seen = self._signals.guard.run(self._signals.take) or (signals, seen)
        if self._health is not None:
            comparisons = self._judging.run(self._health.compare_ranks, step) or ()
            digests = self._judging.run(self._compare_digests, step) or ()
            self.reduction.is_confirmed |= any(each.same_gradient for each in digests)
        is_late = any(used.reading.known is None for used in self.builder.used())
        if self._incidents is not None:
            self._incidents.guard.run(self._settle_late)
            self._incidents.guard.run(self._end_incidents, step, is_late)
            # Also where it is out: what it holds must not be held until the end.
            self._incidents.guard.attempt(self._incidents.end_step, step)
        if self._losses is not None:
            self._losses.end_step()
        if doubts and self._dumps is not None and self._dumps.holds_gradients:
            # A dump says what it is of when it is handed over.
            gradient = after_doubts(gradient, doubts)
            doubts = ()
        made = MadeStep(step, gradient)
        made = self._dumping.run(self._with_clipping, made) or made
        self.builder.end_step(gradient, signals, seen, comparisons, doubts, digests)
        self._late = self.builder.newest if is_late else None
        finished = self.builder.finished()
        self._write_logged(wait=False)
        self._finish_all(finished)
        self._dumping.run(self._end_dumps, made, finished)
        # Last of all: this may be an exception, and the step is complete by now.
        if self._brake is not None:
            self._brake.end_step(judged_late=self.builder.is_merged)

    def _compare_digests(self, step: int) -> Sequence[RankDigests]:
        health = self._health
        if health is None:
            return ()
        gradients: list[HostCopy] = []
        batch: Sequence[HostCopy] = ()
        if health.wants_digests(step):
            readings = [used.reading.norms for used in self.builder.used()]
            gradients = [HostCopy.of(each) for norms in readings for each in norms.extremes()]
            if self._signals is not None:
                batch = self._signals.guard.run(self._signals.batch) or ()
        return health.compare_digests(step, gradients, batch)

    def _with_clipping(self, made: MadeStep) -> MadeStep:
        if self._dumps is None or not self._dumps.holds_gradients:
            return made
        return replace(made, clips=tuple(self.builder.clips()))

    def _end_dumps(self, made: MadeStep, finished: Sequence[MeasuredStep]) -> None:
        """Write what was copied; what was found only now is dumped as it was left, if at all."""
        self._decision = DumpDecision()
        if self._early is not None:
            self._early.end_step()
        dumps = self._dumps
        if dumps is None:
            return
        if dumps.is_wanted and not dumps.holds_gradients:
            for measured in finished:
                if measured.step.step == made.step:
                    remaining = self.builder.remaining_share(measured)
                    clip = measured.step.clip_coef
                    made = replace(made, remaining=remaining, clip_coef=clip)
        dumps.step_made(made)

    def _end_incidents(self, step: int, is_late: bool) -> None:
        norms = None if is_late else self._last
        self._last = None
        if self._incidents is not None and self._health is not None and norms is not None:
            if self._manual:
                code = self._health.alarm.too_large(norms, None)
                if code is not None:
                    self._incidents.too_large(step, code, self._factor)
            self._health.alarm.end_step(norms)

    def look_away_from_threads(self) -> None:
        """Several threads train these parameters at once: say so, and read nothing of them."""
        # Nothing is unhooked here: the other threads may be walking through the hooks.
        if self._signals is not None:
            self._signals.guard.run(self._signals.look_away)
        if self._incidents is not None:
            self._incidents.guard.run(self._incidents.calls.look_away)
        self._problems.report("threads", _SEVERAL_THREADS, step=self.builder.step)

    # A finished step.

    def _finish_all(self, steps: Sequence[MeasuredStep]) -> None:
        for measured in steps:
            late = self._late
            is_late = late is not None and late.number <= measured.step.step
            if is_late and self._incidents is not None:
                self._incidents.guard.run(self._settle_late)
            self._finish(measured)

    def _finish(self, measured: MeasuredStep) -> None:
        self._problems.step = measured.step.step
        if measured.step.gradient == NO_GRADIENT:
            self._problems.report(
                "no-gradient",
                f"step {measured.step.step}: no parameter of the model has a gradient. The record "
                "says so. A step needs a backward() that reaches the model, and no zero_grad() "
                "between the two.",
            )
        # Each finding goes through once and is written once, with all that is known of it.
        findings: list[Finding] = []
        if self._health is not None:
            findings = self._judging.run(self._health.judge, measured) or []
        if self._incidents is not None:
            explain = self._incidents.explain
            findings = self._incidents.guard.run(explain, measured, findings) or findings
            if findings:
                findings = self._advised(findings)
        if self._dumps is not None:
            self._dumping.run(self._dumps.judged, measured.step.step, findings)
        for output, guard in self._outputs:
            guard.attempt(output.write, measured, findings)

    def _advised(self, findings: list[Finding]) -> list[Finding]:
        """Fit the advice of findings to their causes."""
        if self._health is None:
            return findings
        return self._judging.run(self._health.advised, findings) or findings

    def flush(self, patience: float | None = None) -> None:
        """Wait for everything that is on its way, and finish it.

        patience: how many seconds to wait for other ranks, where they may be gone.
        """
        with self.lock:
            self._finish_all(self.builder.flush(patience))
            if self._dumps is not None and patience is None:
                self._dumping.run(self._dumps.dump_kept)
            self._write_logged(wait=True)

    def finish_judging(self) -> None:
        """The run is over: write the last word of every finding."""
        if self._health is None:
            return
        findings = self._health.finish()
        if self._incidents is not None:
            with_causes = self._incidents.with_causes
            findings = self._incidents.guard.run(with_causes, findings) or findings
            findings = self._advised(findings)
        abstained = self._health.abstentions()
        for output, guard in self._outputs:
            guard.attempt(output.finish, findings, abstained)

    # What the user logs.

    def log(self, values: Mapping[str, float | HostCopy]) -> None:
        """Add to the step under way, or to the one just made if none has begun."""
        with self.lock:
            is_ahead = self.builder.is_of_step_under_way
            ahead = {name: value for name, value in values.items() if is_ahead(name)}
            self.builder.log(ahead)
            made = {name: value for name, value in values.items() if name not in ahead}
            if not made or self.builder.log_to_last(made):
                return
            self._logged_late.append((self.builder.step - 1, made))
            self._write_logged(wait=False)

    def _write_logged(self, wait: bool) -> None:
        """Write what was logged to steps that had arrived already, as far as it has come."""
        while self._logged_late:
            step, values = self._logged_late[0]
            on_their_way = [each for each in values.values() if isinstance(each, HostCopy)]
            if not wait and not all(each.ready() for each in on_their_way):
                return
            self._logged_late.popleft()
            known = {name: arrived(value) for name, value in values.items()}
            for output, guard in self._outputs:
                guard.attempt(output.log, step, known)

    def log_under_way(self, values: Mapping[str, float | HostCopy]) -> None:
        """Add to the step under way, though nothing of it may have been seen yet."""
        with self.lock:
            self.builder.log(values)

    def log_scalar(self, name: str, value: float, step: int) -> bool:
        """A number of the step under way or just made; False where it is neither's.

        Then it is kept apart from the steps.
        """
        with self.lock:
            is_of_the_run = self.builder.step - 1 <= step <= self.builder.step
            for output, guard in self._outputs:
                log = output.log_scalar if is_of_the_run else output.log_tracked
                guard.attempt(log, step, name, value)
        return is_of_the_run


def _output_guard(output: Output, problems: Problems) -> Guard:
    """A fault of one output leaves the others at work."""
    return Guard(problems, output.title, f"{output.title} could not be written to")
