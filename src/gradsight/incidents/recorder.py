"""The flight recorder of a watched run: knows a bad step when it comes, has it diagnosed on the
spot, writes the incident.

A gradient that is not finite is diagnosed at the look after backward, a spike when the optimizer is
about to use it: in both cases the parameters are still those of the bad step. What is written waits
for the judge's word.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from gradsight.core import moments as interception
from gradsight.core.calls import RecordedCall, suspended
from gradsight.core.group import rank, world_size
from gradsight.core.parameters import unwrapped
from gradsight.core.problems import Problems
from gradsight.health.alarm import EXPLODING, INF, NAN, SPIKE, Alarm
from gradsight.health.instrument import Health
from gradsight.incidents.incident import Incidents, Staged, of_ending, of_finding, told
from gradsight.incidents.kept_calls import Calls
from gradsight.incidents.ring import Ring
from gradsight.measure.norms import Norms
from gradsight.session.step_builder import Measured
from gradsight.store.diagnoses import is_broken, numbered
from gradsight.values.diagnoses import Diagnosis
from gradsight.values.findings import ONE_LOOK, PRECISION, TREND, Finding

SECONDS = 20.0
"""How long a diagnosis may take unless told otherwise."""
_HELD = {False: (256 * 2**20, 64 * 2**20), True: (2**30, 2**30)}
"""Bytes of arguments and of output gradients that may be held until a step ends; the latter where
batches are to be written.
"""
_ALWAYS = 3
"""Incidents that are all diagnosed; of later ones the 4th, 8th, 16th, ..."""
_OWN = ("gradsight.core.", "gradsight.ghost.", "gradsight.incidents.", "gradsight.session.")
RANK_APART = "GS503"
_DIAGNOSED = (NAN, INF, SPIKE, EXPLODING)
_NOT_CALLED = "the model itself was not called in this step since it is watched: there is nothing to run again"
_TOO_LATE = "the step was seen to be bad only after the optimizer had used its gradient: it was not run again"

Kind = Literal["nonfinite", "spike"]


@dataclass(slots=True)
class _Pending:
    """A diagnosed step that nobody has judged yet."""

    step: int
    code: str
    diagnosis: Diagnosis | None
    staged: Staged | None
    facts: dict[str, Any]
    """How it was diagnosed: for running it again."""
    path: str | None = None


class Recorder:
    """Stands by while a model trains. `look`, `before_update`, `end_step` and `delivered` tell it
    what happens.
    """

    everywhere = True

    def __init__(
        self, model: nn.Module, mode: bool | str, seconds: float, names: list[str], run_dir: Any, health: Health | None,
        problems: Problems, optimizers: int,
    ) -> None:  # fmt: skip
        with_batch = mode == "batch"
        self.calls = Calls(model, *_HELD[with_batch], lasting=with_batch, on_failure=self._failed)
        self._model, self._seconds, self._health, self._problems = (
            unwrapped(model),
            seconds,
            health,
            problems,
        )
        self._ring = Ring(names) if run_dir is not None and rank() == 0 else None
        self._incidents = (
            Incidents(run_dir, self._model, with_batch) if run_dir is not None else None
        )
        self._alarm = Alarm(_limits(health, optimizers))
        self._with_batch, self._by_hand = with_batch, optimizers == 0
        self._last: Norms | None = None
        self._scale = 1.0
        self._met = 0
        self._innocent = 0  # calls of this step after which the gradient was still finite
        self._pending: _Pending | None = None
        self._told: list[Finding] = []
        self._known: set[tuple[str, int]] = set()
        self._stopped = False

    def start(self) -> None:
        """Begin to keep what the model is called with."""
        self.calls.start()

    # At the look and at the update: is this step bad?

    def look(self, step: int, scaler: torch.amp.GradScaler | None, norms: Norms | None) -> None:
        """The gradients are true now; a bad step is diagnosed at once, and once."""
        if norms is None or self._stopped:
            return
        self._last, self._scale = norms, 1.0 if scaler is None else scaler.get_scale()
        if norms.counts is None:
            self._innocent = len(self.calls.used())
            return
        code = (
            None
            if interception.inside_backward()
            else self._alarm.not_finite(norms, scaler, self.calls.root)
        )
        if code is not None:
            with self._survives():
                self._meet(step, "nonfinite", code)

    def before_update(self, step: int, total: float, clip_coef: Callable[[], float | None]) -> None:
        """An optimizer is about to use a gradient of this norm."""
        if self._stopped or not math.isfinite(total):
            return
        code = self._alarm.too_large(total, clip_coef)
        if code is not None:
            with self._survives():
                self._meet(step, "spike", code)

    def end_step(self, step: int, gradient: str, clip_coef: Callable[[], float | None]) -> None:
        """The step is made."""
        norms, self._last = self._last, None
        if norms is not None:
            total = norms.total / self._scale
            if self._by_hand:
                self.before_update(step, total, lambda: None)
            self._alarm.end_step(norms.counts is None, total)
        self._innocent = 0
        self.calls.end_step()

    # What a bad step comes to.

    def _meet(self, step: int, kind: Kind, code: str) -> None:
        """Keep and find out what can be while everything is as it was."""
        self._met += 1
        rare = self._met > _ALWAYS and self._met & (self._met - 1)
        if rare or not (self._seconds or self._with_batch):
            return
        self._forget()
        passes, notes = self.calls.passes()
        first = self._innocent if kind == "nonfinite" else 0
        facts: dict[str, Any] = {
            "kind": kind,
            "scale": self._scale * world_size(),
            "first_pass": first,
        }
        self._pending = _Pending(step, code, None, self._stage(passes), facts)
        if self._seconds:
            found = self._run_again(passes[first:], kind, facts["scale"])
            found = replace(found, notes=(*notes, *found.notes))
            dropped = self.calls.dropped
            self._pending.diagnosis = numbered(
                found, rank(), first + dropped, len(passes) + dropped
            )
        if rank() != 0:
            self._write_part(self._pending)

    def _run_again(self, passes: list[RecordedCall], kind: Kind, scale: float) -> Diagnosis:
        from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose

        if not passes:
            return _nothing(_NOT_CALLED)
        root = self.calls.root
        with suspended(), _own_hooks_silent(self._model):
            return diagnose(
                self._model,
                passes,
                DiagnosisOptions(seconds=self._seconds, kind=kind, loss_root=root, scale=scale),
            )

    def _stage(self, passes: list[Any]) -> Staged | None:
        if self._incidents is None:
            return None
        with self._survives_disk():
            return self._incidents.stage(passes)
        return None

    def _write_part(self, pending: _Pending) -> None:
        """What a rank other than the first has found: beside the incident that the first one
        writes.
        """
        found = pending.diagnosis is None or is_broken(pending.diagnosis)
        found = found or (
            pending.facts["kind"] == "spike"
            and bool(pending.diagnosis and pending.diagnosis.samples)
        )
        if self._incidents is not None and pending.staged is not None and found:
            what = of_ending(
                pending.step,
                f"rank{rank()}",
                f"what rank {rank()} found",
                pending.diagnosis,
            )
            with self._survives_disk():
                name = f"step{pending.step}-rank{rank()}"
                self._incidents.write(name, pending.staged, what | pending.facts, None)
            pending.staged = None
        self._forget()

    # When the judge has spoken.

    def judged(self, finding: Finding) -> None:
        """A finding is new or has changed."""
        key = (finding.code, finding.first_step)
        critical = (
            finding.severity == "critical" and finding.code != RANK_APART
        )  # its NaN is in the mean too: that is the incident
        if key not in self._known and (critical or finding.code == SPIKE):
            self._known.add(key)
            self._told.append(finding)

    def delivered(self, measured: Measured) -> None:
        """A step has been measured and judged: remember it, and write what it has come to."""
        if self._stopped:
            return
        with self._survives():
            norms = measured.norms
            if self._ring is not None:
                rows = (
                    None
                    if norms is None or len(measured.rows) == len(norms.l2) == self._ring.width
                    else measured.rows
                )
                arrays = (None, None) if norms is None else (norms.l2, norms.max_abs)
                self._ring.add(measured.step, measured.loss, rows, *arrays)
            if self._told or self._pending is not None:
                self._settle(measured)

    def _settle(self, measured: Measured) -> None:
        found, self._told = self._told, []
        pending = self._pending
        for finding in found:
            if pending is not None and finding.family in (ONE_LOOK, TREND, PRECISION):
                self._write_pending(pending, finding)
            else:
                self._write_late(measured.step.step, finding)
        if pending is None or measured.step.step < pending.step:
            return
        known = self._health.finding(pending.code) if self._health is not None else None
        broken = measured.norms is not None and measured.norms.counts is not None
        confirmed = (
            known is not None
            and not measured.step.skipped
            and (broken or pending.facts["kind"] == "spike")
        )
        if known is not None and confirmed and pending.path is None and pending.staged is not None:
            self._write_pending(
                pending, known
            )  # the same thing again: the judge tells of it once only
        if not broken or pending.path is not None:
            self._forget()

    def _write_pending(self, pending: _Pending, finding: Finding) -> None:
        """The incident of a diagnosed step; several findings of one step share it."""
        if pending.path is None:
            pending.path = self._write(pending.step, finding, pending)
            pending.staged = None
        if self._health is not None:
            self._health.explain(finding.code, pending.diagnosis, pending.path)

    def _write_late(self, step: int, finding: Finding) -> None:
        """The incident of a step that was judged bad when its gradient had been used already."""
        late = _nothing(_TOO_LATE) if self._seconds and finding.code in _DIAGNOSED else None
        path = self._write(step, finding, None)
        if self._health is not None:
            self._health.explain(finding.code, late, path)

    def _write(self, step: int, finding: Finding, pending: _Pending | None) -> str | None:
        """Write one incident; its path inside the run directory, or None where it could not be
        written.
        """
        if self._incidents is None:
            return None
        name = f"step{step}-{finding.code}"
        with self._survives_disk():
            staged = (pending.staged if pending else None) or self._incidents.stage(
                self.calls.passes()[0]
            )
            what = of_finding(step, finding, pending.diagnosis if pending else None)
            self._incidents.write(
                name, staged, what | (pending.facts if pending else {"after": True}), self._ring
            )
            return f"incidents/{name}"
        return None

    # When the run ends.

    def failed(self, step: int, error: BaseException) -> None:
        """An exception ends the run."""
        if isinstance(error, Exception):
            self._write_ending(step, "exception", told(error))

    def asked_to_end(self, step: int) -> None:
        """SIGTERM has come."""
        if rank() == 0:
            self._write_ending(step, "SIGTERM", "the process was asked to end")

    def _write_ending(self, step: int, code: str, reason: str) -> None:
        if self._incidents is None or self._stopped:
            return
        pending, self._pending = self._pending, None
        name = f"step{step}-{code}" if rank() == 0 else f"step{step}-rank{rank()}"
        with self._survives_disk():
            staged = pending.staged if pending is not None else None
            staged = staged or self._incidents.stage(self.calls.passes(everything=True)[0])
            what = of_ending(step, code, reason, pending.diagnosis if pending is not None else None)
            self._incidents.write(
                name, staged, what | (pending.facts if pending else {}), self._ring
            )

    def stop(self) -> None:
        """Leave everything as it was found."""
        self.calls.stop()
        self._forget()

    def _forget(self) -> None:
        """Nobody has confirmed what was diagnosed, or it is written."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.staged is not None:
            pending.staged.bundle.discard()

    def _failed(self, error: Exception) -> None:
        """A fault of ours: training and the rest of the watch go on."""
        self._stopped = True
        self.calls.stop()
        self._problems.report(
            "recorder", f"the flight recorder stopped: {type(error).__name__}: {error}"
        )

    @contextmanager
    def _survives(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed(error)

    @contextmanager
    def _survives_disk(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._problems.report(
                "incident", f"an incident could not be written: {type(error).__name__}: {error}"
            )


def _limits(health: Health | None, optimizers: int) -> Mapping[str, Any]:
    """The thresholds of the checks whose finding is an incident; norms of several optimizers in
    turn tell nothing of spikes.
    """
    known = health.limits() if health is not None else {}
    wanted = _DIAGNOSED if optimizers < 2 else (NAN, INF)
    return {code: known[code] for code in wanted if code in known}


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
            silenced += [(hooks, dict(hooks))] if ours else []
            for key in ours:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in silenced:
            hooks.clear()
            hooks.update(before)
