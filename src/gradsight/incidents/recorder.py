"""The flight recorder of a watched run: has a bad step diagnosed on the spot, writes the incident.

A gradient that is not finite is diagnosed at the look after backward, a spike when the optimizer is
about to use it: in both cases the parameters are still those of the bad step. What is written waits
for the judge's word.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from torch import Tensor, nn

from gradsight.core.beside import why_noticed
from gradsight.core.calls import RecordedCall, micro_batches, suspended
from gradsight.core.group import rank, world_size
from gradsight.core.guard import Guard
from gradsight.core.parameters import unwrapped
from gradsight.core.problems import Problems
from gradsight.incidents.incident import (
    IncidentWriter,
    StagedIncident,
    describe_error,
    facts_of_ending,
    facts_of_finding,
)
from gradsight.incidents.kept_calls import BackwardGraph, KeptCalls, KeptLimits
from gradsight.incidents.parameter_copy import ParameterCopy
from gradsight.store.diagnoses import is_broken, of_rank
from gradsight.values.diagnoses import Diagnosis
from gradsight.values.endings import LossAtEnd
from gradsight.values.findings import ONE_LOOK, PRECISION, TREND, Finding, IncidentRule
from gradsight.values.measured import MeasuredStep

SECONDS = 20.0
"""How long a diagnosis may take unless told otherwise."""
_HELD = KeptLimits(argument_bytes=256 * 2**20, gradient_bytes=64 * 2**20, lasting=False)
_HELD_WITH_BATCH = KeptLimits(argument_bytes=2**30, gradient_bytes=2**30, lasting=True)
"""Where batches are to be written, they are kept until the model is called again."""
_ALWAYS_DIAGNOSED = 3
"""Incidents that are all diagnosed; of later ones the 4th, 8th, 16th, ..."""
_OWN = ("gradsight.ghost.", "gradsight.incidents.", "gradsight.session.", "gradsight.core.")
_OF_THE_GRADIENT = (ONE_LOOK, TREND, PRECISION)
"""Families of findings that are about the step's gradient, and so share its incident."""
_OF_THE_LOSS = "GS109"
"""The finding of a loss that a script failed on."""
_NOT_CALLED = (
    "the step cannot be run again, because it called no module with these parameters, as "
    "model(x) would"
)
_BEFORE_WATCH = (
    "the first step cannot be run again, because Gradsight starts watching at its backward pass, "
    "after the model was called"
)
_TOO_LATE = (
    "the step was seen to be bad only after the optimizer had used its gradient: "
    "it was not run again"
)
_TOO_LATE_ON_DEVICE = (
    "on an accelerator the gradient is known one step late, when the optimizer has used it: the "
    "step was not run again. The parameters that broke say between which modules the fault was "
    'born; for its operation and samples watch with on_finding={"critical": "skip"} (a fused '
    'optimizer leaves the update out on the device) or with recorder="batch" (keeps a copy of the '
    "parameters)"
)
_AFTER_UPDATE = (
    "run again one step later, with the weights after the update: the gradient was known too late"
)
_GONE = "the step was known to be bad too late: its batch and its parameters are gone"

Kind = Literal["nonfinite", "spike"]


@dataclass(frozen=True, slots=True)
class RecorderOptions:
    """How a run is recorded for the case that something goes wrong."""

    with_batch: bool
    """Whether an incident holds the batch and the parameters, so that it can be replayed."""
    seconds: float
    """How long a diagnosis may take; 0 diagnoses nothing."""
    rules: Mapping[str, IncidentRule]
    """By the code of a check: which of its findings get an incident."""
    first: bool
    """Whether this rank judges and writes; the others write what they find beside it."""
    attached: bool = False
    """Whether the watch is opened at the first backward pass."""
    quiet: bool = True
    """Whether nothing is said of the memory that is kept."""


@dataclass(slots=True)
class _Pending:
    """A diagnosed step that nobody has judged yet."""

    step: int
    code: str
    diagnosis: Diagnosis | None
    staged: StagedIncident | None
    facts: dict[str, Any]
    """How it was diagnosed: for running it again."""
    path: str | None = None


@dataclass(frozen=True, slots=True)
class LateStep:
    """A bad step that was known when the optimizer had used its gradient, or had left it out."""

    step: int
    kind: Kind
    code: str
    scale: float
    """A scaler's factor that was in the gradient."""
    skipped: bool
    """Whether the update was left out, so that the weights are still those of the step."""


class FlightRecorder:
    """Stands by while a model trains; told at the moments of a step, asked to explain findings."""

    def __init__(
        self,
        model: nn.Module,
        run_dir: Path | None,
        options: RecorderOptions,
        problems: Problems,
    ) -> None:
        self.guard = Guard(problems, "recorder", "the flight recorder stopped")
        """A fault of ours: training and the rest of the watch go on."""
        self._writing = Guard(problems, "incident", "an incident could not be written")
        limits = _HELD_WITH_BATCH if options.with_batch else _HELD
        self.calls = KeptCalls(model, limits, self.guard)
        self._model = unwrapped(model)
        self._options = options
        self._copy: ParameterCopy | None = None
        """The parameters before the last update, where numbers come late."""
        if options.with_batch:
            self._copy = ParameterCopy(list(model.parameters()), problems, options.quiet)
        self._writer: IncidentWriter | None = None
        if run_dir is not None:
            self._writer = IncidentWriter(run_dir, self._model, options.with_batch)
        self._incidents_seen = 0
        self._pending: _Pending | None = None
        self._findings: dict[str, Finding] = {}
        self._causes: dict[str, tuple[Diagnosis | None, str | None]] = {}
        """By code: what its first incident was found to come from, and where it is kept."""
        self._at_end: tuple[int, Diagnosis | None] | None = None
        """The step whose loss the script failed on, and where that comes from."""
        self._known: set[tuple[str, int]] = set()
        self._failures: dict[str, str] = {}
        """Errors that the model raised when a step was run again, by purpose."""

    def start(self) -> None:
        """Begin to keep what the model is called with."""
        self.calls.start()

    # At the look and at the update: is this step bad?

    @property
    def loss(self) -> Tensor | None:
        """What backward was last called on in this step."""
        return self.calls.root

    def gradients_are_finite(self) -> None:
        """The gradient is still finite after the calls so far."""
        self.calls.note_clean()

    def not_finite(self, step: int, code: str, scale: float) -> None:
        """A gradient that is not finite begins an incident; a scaler's factor is in it."""
        self._detected(step, "nonfinite", code, scale)

    def too_large(self, step: int, code: str, scale: float) -> None:
        """An optimizer is about to use far too large a gradient."""
        self._detected(step, "spike", code, scale)

    def about_to_update(self, step: int) -> None:
        """An optimizer is about to change the parameters."""
        if self._copy is not None:
            self._copy.take(step)

    def was_bad(self, bad: "LateStep") -> None:
        """A step was bad whose numbers came when its gradient had been used."""
        if self._is_worth_it():
            self._diagnose_late(bad)

    def end_step(self, step: int) -> None:
        """The step is made."""
        self.calls.end_step(step)
        if self.guard.faults:
            self.calls.release()

    def _detected(self, step: int, kind: Kind, code: str, scale: float) -> None:
        """Keep and find out what can be while everything is as it was."""
        if self._is_worth_it():
            # The model is handed on unwrapped: that DDP divides by the ranks is counted here.
            self._diagnose(step, kind, code, scale * world_size())

    def _is_worth_it(self) -> bool:
        """Whether one more bad step is looked into."""
        # A run that is NaN for good must not spend its time on diagnoses.
        self._incidents_seen += 1
        count = self._incidents_seen
        is_power_of_two = count & (count - 1) == 0
        if count > _ALWAYS_DIAGNOSED and not is_power_of_two:
            return False
        return bool(self._options.seconds or self._options.with_batch)

    def _diagnose(self, step: int, kind: Kind, code: str, scale: float) -> None:
        self._forget()
        passes, notes = self.calls.passes()
        first = self.calls.clean() if kind == "nonfinite" else 0
        facts: dict[str, Any] = {"kind": kind, "scale": scale, "first_pass": first}
        # Staged before it is run again: the batch and the parameters as training left them.
        pending = _Pending(step, code, None, self._stage(passes), facts)
        self._pending = pending
        if self._options.seconds:
            diagnosis = self._run_again(passes[first:], kind, scale, self.calls.root)
            diagnosis = replace(diagnosis, notes=(*notes, *diagnosis.notes))
            pending.diagnosis = of_rank(diagnosis, rank(), micro_batches(passes))
        # The judge speaks on the first rank alone: here nobody would confirm it later.
        if not self._options.first:
            self._write_part(pending)

    def _diagnose_late(self, bad: "LateStep") -> None:
        self._forget()
        passes: list[RecordedCall] = []
        notes: list[str] = []
        last = self.calls.last
        if last is not None and last.step == bad.step:
            passes, notes = self.calls.passes_of(last)
        scale = bad.scale * world_size()
        facts: dict[str, Any] = {"kind": bad.kind, "scale": scale, "first_pass": 0}
        copy = self._copy
        has_copy = not bad.skipped and copy is not None and copy.step == bad.step
        weights_are_there = bad.skipped or has_copy
        with copy.put_in() if copy is not None and has_copy else nullcontext():
            refusal = None if weights_are_there else _GONE
            pending = _Pending(bad.step, bad.code, None, self._stage(passes, refusal), facts)
            self._pending = pending
            if not self._options.seconds:
                return
            if not weights_are_there and bad.kind == "nonfinite":
                pending.diagnosis = _nothing(_TOO_LATE_ON_DEVICE)
                return
            if not weights_are_there:
                notes = [_AFTER_UPDATE, *notes]
            root = None if last is None else last.root
            diagnosis = self._run_again(passes, bad.kind, scale, root)
            diagnosis = replace(diagnosis, notes=(*notes, *diagnosis.notes))
            pending.diagnosis = of_rank(diagnosis, rank(), micro_batches(passes))
        if not self._options.first:
            self._write_part(pending)

    def _run_again(
        self, passes: list[RecordedCall], kind: Kind, scale: float, root: Tensor | None
    ) -> Diagnosis:
        # Here, because it imports much that a healthy run never needs.
        from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose

        if not passes:
            return self._without_calls()
        with suspended(), _own_hooks_silent(self._model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script has had its own already
            options = DiagnosisOptions(
                seconds=self._options.seconds,
                kind=kind,
                loss_root=root,
                scale=scale,
                not_run=why_noticed(self._model),
                failures=self._failures,
            )
            return diagnose(self._model, passes, options)

    def _without_calls(self) -> Diagnosis:
        """Return a diagnosis from the autograd graph alone, where no call of the step is known."""
        from gradsight.incidents.diagnosis.loss import fault_in_graph, only_steep_operation

        if self._options.attached and self.calls.made_step is None:
            return replace(_nothing(_BEFORE_WATCH), operation=only_steep_operation(self.loss))
        graph = self.calls.graph()
        fault = None if graph is None else fault_in_graph(graph)
        return replace(_nothing(_NOT_CALLED), operation=fault)

    def _stage(
        self, passes: list[RecordedCall], refusal: str | None = None
    ) -> StagedIncident | None:
        if self._writer is None:
            return None
        staged: StagedIncident | None = self._writing.attempt(self._writer.stage, passes, refusal)
        return staged

    def _write_part(self, pending: _Pending) -> None:
        """What a rank other than the first has found: beside the incident that the first writes."""
        diagnosis = pending.diagnosis
        tells_something = diagnosis is None or is_broken(diagnosis)
        if diagnosis is not None and pending.facts["kind"] == "spike":
            tells_something = tells_something or bool(diagnosis.samples)
        if self._writer is not None and pending.staged is not None and tells_something:
            code = f"rank{rank()}"
            reason = f"what rank {rank()} found"
            facts = facts_of_ending(pending.step, code, reason, diagnosis) | pending.facts
            name = f"step{pending.step}-{code}"
            self._writing.attempt(self._writer.write, name, pending.staged, facts)
            pending.staged = None
        self._forget()

    # When the judge has spoken.

    def explain(self, measured: MeasuredStep, findings: Sequence[Finding]) -> list[Finding]:
        """The findings of a step with their causes; writes the incidents that they come to.

        A finding that was known before is among them where its cause is known only now.
        """
        explained = list(findings)
        for finding in findings:
            self._findings[finding.code] = finding
        explained += self._write_incidents(measured, findings)
        return self.with_causes(explained)

    def with_causes(self, findings: Sequence[Finding]) -> list[Finding]:
        """The same findings, each with the cause of its first incident where that is known."""
        explained = []
        for finding in findings:
            diagnosis, incident = self._causes.get(finding.code, (None, None))
            if self._at_end is not None and (finding.code, finding.first_step) == (
                _OF_THE_LOSS,
                self._at_end[0],
            ):
                diagnosis = self._at_end[1]
            explained.append(replace(finding, diagnosis=diagnosis, incident=incident))
        return explained

    def _write_incidents(
        self, measured: MeasuredStep, findings: Sequence[Finding]
    ) -> list[Finding]:
        """Write what this step has come to; the known finding whose incident it is once more."""
        pending = self._pending
        for finding in findings:
            if not self._is_new_incident(finding):
                continue
            if pending is not None and finding.family in _OF_THE_GRADIENT:
                self._write_pending(pending, finding)
            else:
                self._write_late(measured.step.step, finding)
        if pending is None or measured.step.step < pending.step:
            return []
        known = self._findings.get(pending.code)
        again: list[Finding] = []
        if known is not None and pending.path is None and pending.staged is not None:
            still_bad = not measured.finite or pending.facts["kind"] == "spike"
            if still_bad and not measured.step.skipped:
                # The same thing once more: the judge tells of it once only.
                self._write_pending(pending, known)
                again = [known]
        if measured.finite or pending.path is not None:
            self._forget()
        return again

    def _is_new_incident(self, finding: Finding) -> bool:
        rule = self._options.rules.get(finding.code)
        key = (finding.code, finding.first_step)
        if rule is None or key in self._known:
            return False
        if rule.kept == "never" or (rule.kept != "always" and finding.severity != "critical"):
            return False
        self._known.add(key)
        return True

    def _write_pending(self, pending: _Pending, finding: Finding) -> None:
        """The incident of a diagnosed step; several findings of one step share it."""
        if pending.path is None:
            pending.path = self._write(pending.step, finding, pending)
            pending.staged = None
        self._causes.setdefault(finding.code, (pending.diagnosis, pending.path))

    def _write_late(self, step: int, finding: Finding) -> None:
        """The incident of a step that was judged bad when its gradient had been used already."""
        diagnosis = None
        if self._options.seconds and self._options.rules[finding.code].known_early:
            diagnosis = _nothing(_TOO_LATE)
        path = self._write(step, finding, None)
        self._causes.setdefault(finding.code, (diagnosis, path))

    def _write(self, step: int, finding: Finding, pending: _Pending | None) -> str | None:
        """Write one incident; its path inside the run directory, None where that failed."""
        if self._writer is None:
            return None
        path: str | None = self._writing.attempt(
            self._write_with, self._writer, step, finding, pending
        )
        return path

    def _write_with(
        self, writer: IncidentWriter, step: int, finding: Finding, pending: _Pending | None
    ) -> str:
        name = f"step{step}-{finding.code}"
        staged = None if pending is None else pending.staged
        if staged is None:
            # Where numbers come late, the calls that are kept are of a later step.
            refusal = None if self.calls.made_step in (None, step) else _GONE
            staged = writer.stage(self.calls.passes()[0], refusal)
        if pending is None:
            facts = facts_of_finding(step, finding, None) | {"after": True}
        else:
            facts = facts_of_finding(step, finding, pending.diagnosis) | pending.facts
        writer.write(name, staged, facts)
        return f"incidents/{name}"

    # When the run ends.

    def loss_at_end(self, step: int, where: BaseException | FrameType) -> LossAtEnd | None:
        """The loss that a script fails on, if it is not finite; finds out where that comes from.

        where: the exception, or the function that ends the script.
        """
        # Here, because it imports much that a healthy run never needs.
        from gradsight.incidents.ending import broken_loss, running

        found = broken_loss(running(where), list(self._model.parameters()))
        if found is None:
            return None
        was_backward = found.loss is self.calls.root
        graph = None if was_backward else self.calls.unfinished(found.loss)
        if not was_backward and graph is None and self.calls.made_step is not None:
            return None  # it is of an earlier step
        pending = self._pending
        diagnosis: Diagnosis | None = None
        if pending is not None and pending.step == step:
            diagnosis = pending.diagnosis
        elif self._options.seconds and graph is not None:
            diagnosis = self._diagnose_loss(graph)
        self._at_end = (step, diagnosis)
        return LossAtEnd(step, found.name, found.state, found.place, found.inputs)

    def _diagnose_loss(self, graph: BackwardGraph) -> Diagnosis:
        """Find out why a loss is not finite that backward was not called on."""
        from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose_loss

        passes, notes = self.calls.passes(everything=True)
        with suspended(), _own_hooks_silent(self._model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script has had its own already
            options = DiagnosisOptions(
                seconds=self._options.seconds,
                kind="nonfinite",
                not_run=why_noticed(self._model),
                failures=self._failures,
            )
            diagnosis = diagnose_loss(self._model, passes, graph, options)
        return replace(diagnosis, notes=(*notes, *diagnosis.notes))

    def failed(self, step: int, error: BaseException) -> None:
        """An exception ends the run."""
        # Ctrl-C and sys.exit() leave early on purpose.
        if isinstance(error, Exception):
            self._write_ending(step, "exception", describe_error(error))

    def _write_ending(self, step: int, code: str, reason: str) -> None:
        if self._writer is not None and not self.guard.faults:
            self._writing.attempt(self._write_ending_with, self._writer, step, code, reason)

    def _write_ending_with(self, writer: IncidentWriter, step: int, code: str, reason: str) -> None:
        pending = self._pending
        self._pending = None
        name = f"step{step}-{code}" if self._options.first else f"step{step}-rank{rank()}"
        staged = None if pending is None else pending.staged
        if staged is None:
            staged = writer.stage(self.calls.passes(everything=True)[0])
        diagnosis = None if pending is None else pending.diagnosis
        facts = facts_of_ending(step, code, reason, diagnosis)
        if pending is not None:
            facts |= pending.facts
        writer.write(name, staged, facts)

    def look_away(self) -> None:
        """Keep no more calls of the model; what is pending can still be written."""
        self.calls.stop()

    def stop(self) -> None:
        """Leave everything as it was found."""
        self.calls.stop()
        self._forget()

    def _forget(self) -> None:
        """Nobody has confirmed what was diagnosed, or it is written."""
        pending = self._pending
        self._pending = None
        if pending is not None and pending.staged is not None:
            pending.staged.bundle.discard()


def _nothing(note: str) -> Diagnosis:
    return Diagnosis(None, (), 0.0, (note,))


@contextmanager
def _own_hooks_silent(model: nn.Module) -> Iterator[None]:
    """Hooks of ours (the ghost engine's, say) see the training, not its diagnosis."""
    silenced = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [
                key
                for key, hook in hooks.items()
                if str(getattr(hook, "__module__", "")).startswith(_OWN)
            ]
            if ours:
                silenced.append((hooks, dict(hooks)))
            for key in ours:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in silenced:
            hooks.clear()
            hooks.update(before)
