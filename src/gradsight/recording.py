"""The flight recorder of a watched run: knows a bad step when it comes, has it diagnosed on the spot, writes the incident.

A gradient that is not finite is diagnosed at the look after backward, a spike when the optimizer is about to use it: in both
cases the parameters are still those of the bad step. What is written waits for the judge's word.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from gradsight import dist
from gradsight.assemble import Measured
from gradsight.capture import interception
from gradsight.capture.calls import Calls
from gradsight.health import Health
from gradsight.incidents import Incidents, Staged, of_ending, of_finding, told
from gradsight.judge.usual import Usual
from gradsight.measure.norms import Norms
from gradsight.passes import Pass
from gradsight.record.diagnoses import is_broken, numbered
from gradsight.record.problems import Problems
from gradsight.record.ring import Ring
from gradsight.records import Diagnosis, Finding

SECONDS = 20.0
"""How long a diagnosis may take unless told otherwise."""
_HELD = {False: (256 * 2**20, 64 * 2**20), True: (2**30, 2**30)}
"""Bytes of arguments and of output gradients that may be held until a step ends; the latter where batches are to be written."""
_ALWAYS = 3
"""Incidents that are all diagnosed; of later ones the 4th, 8th, 16th, ..."""
_SCALER_PATIENCE = 8
"""Overflows in a row that a GradScaler is trusted to settle by itself."""
_OWN = ("gradsight.ghost.", "gradsight.capture.")
_SPIKE, _EXPLODING = "GS201", "GS102"


@dataclass(slots=True)
class _Pending:
    """A diagnosed step that nobody has judged yet."""

    step: int
    code: str
    diagnosis: Diagnosis
    staged: Staged | None
    facts: dict[str, Any]
    """How it was diagnosed: for running it again."""
    path: str | None = None


class Recorder:
    """Stands by while a model trains. `look`, `before_update`, `end_step` and `delivered` tell it what happens."""

    everywhere = True

    def __init__(
        self, model: nn.Module, mode: bool | str, seconds: float, names: list[str], run_dir: Any, health: Health | None,
        problems: Problems, optimizers: int,
    ) -> None:  # fmt: skip
        with_batch = mode == "batch"
        self.calls = Calls(model, *_HELD[with_batch], lasting=with_batch, on_failure=self._failed)
        self._model, self._seconds, self._health, self._problems = _innermost(model), seconds, health, problems
        self._sharded = dist.are_spread(list(model.parameters()))
        self._ring = Ring(names) if run_dir is not None and dist.rank() == 0 else None
        self._incidents = Incidents(run_dir, self._model, with_batch) if run_dir is not None else None
        self._limits = health.limits() if health is not None and optimizers < 2 else {}
        self._by_hand = optimizers == 0
        self._usual = Usual()
        self._steps, self._previous, self._scale = 0, 0.0, 1.0
        self._last: Norms | None = None
        self._bad_in_a_row = self._large_in_a_row = self._met = 0
        self._diagnosed = -1
        self._known_bad = False  # this stretch of bad steps has been met already
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
        self._last = norms
        self._scale = 1.0 if scaler is None else scaler.get_scale()
        if norms.counts is not None and self._health is not None and self._is_new(scaler):
            with self._survives():
                code = "GS103" if norms.counts[0].any() else "GS104"
                self._diagnose(step, "nonfinite", code)
        if norms.counts is None:
            self._innocent = len(self.calls.used())

    def before_update(self, step: int, total: float, clip_coef: Callable[[], float | None]) -> None:
        """An optimizer is about to use a gradient of this norm."""
        if self._stopped or self._health is None or not math.isfinite(total) or step == self._diagnosed:
            return
        code = self._too_large(total, clip_coef)
        if code is not None:
            with self._survives():
                self._diagnose(step, "spike", code)

    def end_step(self, step: int, gradient: str, clip_coef: Callable[[], float | None]) -> None:
        """The step is made."""
        norms, self._last = self._last, None
        if norms is not None and self._by_hand:
            self.before_update(step, norms.total / self._scale, lambda: None)
        bad = norms is not None and norms.counts is not None
        self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
        self._known_bad &= bad
        if norms is not None and not bad:
            self._remember(norms.total / self._scale)
        self._innocent = 0
        self.calls.end_step()

    def _is_new(self, scaler: torch.amp.GradScaler | None) -> bool:
        """Whether this bad gradient begins an incident. What a GradScaler will settle by itself is none."""
        if self._known_bad or interception.inside_backward():
            return False
        root = self.calls.root
        if scaler is not None and (root is None or bool(torch.isfinite(root.detach()).all())):
            return self._bad_in_a_row >= _SCALER_PATIENCE
        return True

    def _too_large(self, total: float, clip_coef: Callable[[], float | None]) -> str | None:
        """The code under which the judge will find this norm, by the same thresholds."""
        exploding, spike = self._limits.get(_EXPLODING), self._limits.get(_SPIKE)
        if exploding is not None and total > exploding["limit"] and total * (clip_coef() or 1.0) > exploding["limit"]:
            self._large_in_a_row += 1
            if self._large_in_a_row == exploding["patience"]:
                return _EXPLODING
        else:
            self._large_in_a_row = 0
        return _SPIKE if spike is not None and self._is_spike(total, spike) else None

    def _is_spike(self, total: float, limits: Mapping[str, float]) -> bool:
        excess = self._usual.excess(_logarithm(total)) if self._steps >= 11 and total > limits["least"] else None
        if excess is None or total < limits["jump"] * self._previous:
            return False
        return excess[0] > math.log(limits["factor"]) and excess[1] > limits["sigmas"]

    def _remember(self, total: float) -> None:
        """Take a finite norm into what is usual."""
        self._steps += 1
        self._previous = total
        self._usual.enter(_logarithm(total))

    # What a bad step comes to.

    def _diagnose(self, step: int, kind: Literal["nonfinite", "spike"], code: str) -> None:
        """Find out what can be found out while everything is as it was."""
        self._diagnosed, self._known_bad = step, kind == "nonfinite"
        self._met += 1
        if self._seconds <= 0 or (self._met > _ALWAYS and self._met & (self._met - 1)):
            return
        self._forget()
        passes, notes = self.calls.passes()
        staged = self._stage(passes)
        first = self._innocent if kind == "nonfinite" else 0
        facts: dict[str, Any] = {"kind": kind, "scale": self._scale * dist.world_size(), "first_pass": first}
        diagnosis = _nothing("the parameters are spread over ranks: no rank can run the step again by itself")
        if not passes:
            diagnosis = _nothing(
                "the model itself was not called in this step since it is watched: there is nothing to run again"
            )
        elif not self._sharded:
            diagnosis = self._run_again(passes[first:], kind, facts["scale"])
        diagnosis = replace(diagnosis, notes=(*notes, *diagnosis.notes))
        diagnosis = numbered(diagnosis, dist.rank(), first + self.calls.dropped, len(passes) + self.calls.dropped)
        self._pending = _Pending(step, code, diagnosis, staged, facts)
        if dist.rank() != 0:
            self._write_part(self._pending)

    def _run_again(self, passes: list[Pass], kind: Literal["nonfinite", "spike"], scale: float) -> Diagnosis:
        from gradsight.diagnose.diagnose import diagnose

        root = self.calls.root
        with interception.suspend(), _own_hooks_silent(self._model):
            return diagnose(self._model, passes, seconds=self._seconds, kind=kind, loss_root=root, scale=scale)

    def _stage(self, passes: list[Any]) -> Staged | None:
        if self._incidents is None:
            return None
        with self._survives_disk():
            return self._incidents.stage(passes)
        return None

    def _write_part(self, pending: _Pending) -> None:
        """What a rank other than the first has found: beside the incident that the first one writes."""
        found = is_broken(pending.diagnosis) or (pending.facts["kind"] == "spike" and pending.diagnosis.samples)
        if self._incidents is not None and pending.staged is not None and found:
            what = of_ending(pending.step, f"rank{dist.rank()}", f"what rank {dist.rank()} found", pending.diagnosis)
            with self._survives_disk():
                name = f"step{pending.step}-rank{dist.rank()}"
                self._incidents.write(name, pending.staged, what | pending.facts, None)
            pending.staged = None
        self._forget()

    # When the judge has spoken.

    def judged(self, finding: Finding) -> None:
        """A finding is new or has changed."""
        key = (finding.code, finding.first_step)
        if key not in self._known and (finding.severity == "critical" or finding.code == _SPIKE):
            self._known.add(key)
            self._told.append(finding)

    def delivered(self, measured: Measured) -> None:
        """A step has been measured and judged: remember it, and write what it has come to."""
        if self._stopped:
            return
        with self._survives():
            norms = measured.norms
            if self._ring is not None:
                rows = None if norms is None or len(measured.rows) == len(norms.l2) == self._ring.width else measured.rows
                arrays = (None, None) if norms is None else (norms.l2, norms.max_abs)
                self._ring.add(measured.step, measured.loss, rows, *arrays)
            if self._told or self._pending is not None:
                self._settle(measured)

    def _settle(self, measured: Measured) -> None:
        found, self._told = self._told, []
        pending = self._pending
        for finding in found:
            related = pending is not None and (finding.code[2] in "124" or finding.code == pending.code)
            if related and pending is not None:
                self._write_pending(pending, finding)
            else:
                self._write(measured.step.step, finding, None)
        if pending is None or measured.step.step < pending.step:
            return
        known = self._health.finding(pending.code) if self._health is not None else None
        broken = measured.norms is not None and measured.norms.counts is not None
        confirmed = known is not None and not measured.step.skipped and (broken or pending.facts["kind"] == "spike")
        if known is not None and confirmed and pending.path is None and pending.staged is not None:
            self._write_pending(pending, known)  # the same thing again: the judge tells of it once only
        if not broken or pending.path is not None:
            self._forget()

    def _write_pending(self, pending: _Pending, finding: Finding) -> None:
        """The incident of a diagnosed step; several findings of one step share it."""
        if pending.path is None:
            pending.path = self._write(pending.step, finding, pending)
            pending.staged = None
        if self._health is not None:
            self._health.explain(finding.code, pending.diagnosis, pending.path)

    def _write(self, step: int, finding: Finding, pending: _Pending | None) -> str | None:
        """Write one incident; its path inside the run directory, or None where it could not be written."""
        if self._incidents is None:
            return None
        name = f"step{step}-{finding.code}"
        with self._survives_disk():
            staged = (pending.staged if pending else None) or self._incidents.stage(self.calls.passes()[0])
            what = of_finding(step, finding, pending.diagnosis if pending else None)
            self._incidents.write(name, staged, what | (pending.facts if pending else {"after": True}), self._ring)
            if self._health is not None and pending is None:
                self._health.explain(finding.code, None, f"incidents/{name}")
            return f"incidents/{name}"
        return None

    # When the run ends.

    def failed(self, step: int, error: BaseException) -> None:
        """An exception ends the run."""
        if isinstance(error, Exception):
            self._write_ending(step, "exception", told(error))

    def asked_to_end(self, step: int) -> None:
        """SIGTERM has come."""
        if dist.rank() == 0:
            self._write_ending(step, "SIGTERM", "the process was asked to end")

    def _write_ending(self, step: int, code: str, reason: str) -> None:
        if self._incidents is None or self._stopped:
            return
        pending, self._pending = self._pending, None
        name = f"step{step}-{code}" if dist.rank() == 0 else f"step{step}-rank{dist.rank()}"
        with self._survives_disk():
            staged = pending.staged if pending is not None else None
            staged = staged or self._incidents.stage(self.calls.passes()[0])
            what = of_ending(step, code, reason, pending.diagnosis if pending is not None else None)
            self._incidents.write(name, staged, what | (pending.facts if pending else {}), self._ring)

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
        self._problems.report("recorder", f"the flight recorder stopped: {type(error).__name__}: {error}")

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
            self._problems.report("incident", f"an incident could not be written: {type(error).__name__}: {error}")


def _nothing(note: str) -> Diagnosis:
    return Diagnosis(None, (), 0.0, (note,))


@contextmanager
def _own_hooks_silent(model: nn.Module) -> Iterator[None]:
    """Hooks of ours (the ghost engine's, say) see the training, not its diagnosis."""
    silenced = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(_OWN)]
            silenced += [(hooks, dict(hooks))] if ours else []
            for key in ours:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in silenced:
            hooks.clear()
            hooks.update(before)


def _innermost(model: nn.Module) -> nn.Module:
    """The user's own module below data-parallel and compiling wrappers."""
    name = type(model).__name__
    inner = model._modules.get({"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}.get(name, ""))
    return model if inner is None else _innermost(inner)


def _logarithm(total: float) -> float:
    return math.log(max(total, 1e-40))
