"""Dumps under a watch: copied when a gradient is true, written when its step is made."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradsight.core import moments
from gradsight.core.group import world_size
from gradsight.core.problems import Problems
from gradsight.dump.dumper import GradientDumper
from gradsight.dump.job import Facts, Job, LateFacts
from gradsight.dump.kept_gradients import KeptGradients
from gradsight.dump.manifest import SCHEDULE, joined_reasons
from gradsight.measure.clipping import ClipReading
from gradsight.measure.host_copy import loss_scale
from gradsight.values.findings import Finding, Suspicion
from gradsight.values.steps import CHANGED_GRADIENT, TRUE_GRADIENT

_USED = "as the optimizer used it, after any clipping"
_MIXED = "of several optimizers, as found after the last backward pass"


@dataclass(frozen=True, slots=True)
class MadeStep:
    """What is known of a step once it is made."""

    step: int
    gradient: str
    """What its gradients were when they were looked at."""
    clips: tuple[ClipReading | None, ...] = ()
    """How much its optimizers used of the gradient that was copied: on its way from the device."""
    clip_coef: float | None = None
    """The same where it is known."""
    remaining: float | None = None
    """What is left of each gradient after the step, as a share; None if that is not one number."""


class WatchedDumps:
    """Hands the gradients of due and of bad steps to a dumper."""

    def __init__(
        self,
        dumper: GradientDumper,
        model: nn.Module,
        optimizers: int,
        problems: Problems,
    ) -> None:
        self._kept: KeptGradients | None = None
        self._kept_facts: Facts | None = None
        """What is known of the gradient that is kept, once its step is made."""
        self._dumped = -1
        """The last step that was written."""
        self._dumper = dumper
        self._model = model
        self._problems = problems
        self._several = optimizers > 1
        self._judged: set[tuple[str, int]] = set()
        self._found: list[tuple[str, int]] = []
        """What the judge has found, and at which step, that no dump shows yet."""
        self._bad_dumped = -1
        """The last step that was dumped for what was found of it."""
        self._staged: tuple[Job, Facts] | None = None

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of the step under way were copied."""
        return self._staged is not None or self.keeps_gradients

    @property
    def is_wanted(self) -> bool:
        """Whether something was found that asks for a dump, and there is none yet."""
        return bool(self._found)

    def gradients_ready(
        self,
        step: int,
        scaler: torch.amp.GradScaler | None,
        suspicion: Suspicion | None,
        wanted: bool,
        complete: bool,
    ) -> None:
        """The gradients are true now; a later look of the same step replaces this one.

        suspicion: what will be found of this step.
        wanted: an earlier finding asks for a dump, on rank 0.
        complete: no gradient was edited before this look.
        """
        self._forget()
        if self._kept is not None and not moments.inside_backward():
            self._kept_facts = None
            self._kept.keep(step, loss_scale(scaler))
        bad = suspicion is not None and self._dumper.wants_finding(suspicion.severity)
        due = bad or wanted or self._dumper.wants(step)
        if not due or moments.inside_backward():
            return
        reasons = self._reasons(step)
        if bad and suspicion is not None:
            reasons.insert(0, f"{suspicion.code} {suspicion.name}")
        gradient = TRUE_GRADIENT if complete else CHANGED_GRADIENT
        facts = Facts(
            gradient=_MIXED if self._several else gradient,
            reason=joined_reasons(reasons),
            late=LateFacts(scale=loss_scale(scaler)),
        )
        job = self._dumper.stage(self._model, step, facts)
        if job is not None:
            self._staged = (job, facts)

    def judged(self, step: int, findings: Sequence[Finding]) -> None:
        """What was found at this step; each new finding asks for one dump."""
        for finding in findings:
            key = (finding.code, finding.first_step)
            if key in self._judged or not self._dumper.wants_finding(finding.severity):
                continue
            self._judged.add(key)
            # Sharded gradients are judged a step later, when this one may have been dumped already.
            if step != self._bad_dumped:
                self._found.append((f"{finding.code} {finding.name}", step))

    def keep_gradients(self, parameters: Sequence[Tensor], quiet: bool) -> None:
        """Steps are judged when their gradient is gone: keep it until then, if there is room."""
        self._kept = KeptGradients(parameters, quiet)

    @property
    def keeps_gradients(self) -> bool:
        """Whether a step can be dumped when it is judged, after its gradient is gone."""
        return self._kept is not None

    def dump_kept(self) -> None:
        """A step is judged whose gradient is kept: dump that where something was found of it."""
        kept = self._kept
        facts = self._kept_facts
        if kept is None or facts is None or not self._found:
            return
        if all(step != kept.step for _, step in self._found) or kept.step is None:
            return
        reasons = self._reasons(kept.step)
        self._found = []
        if kept.step == self._dumped:  # by schedule
            return
        self._dumped = kept.step
        self._bad_dumped = kept.step
        with kept.in_place():
            reason = joined_reasons(reasons)
            self._dumper.capture(self._model, kept.step, replace(facts, reason=reason))

    def _keep_facts(self, made: MadeStep) -> None:
        if self._kept is not None and self._kept.step == made.step:
            late = LateFacts(self._kept.scale, made.clips)
            gradient = _MIXED if self._several else made.gradient
            self._kept_facts = Facts(gradient=gradient, late=late)

    def _reasons(self, dumped: int) -> list[str]:
        """What was found, as the reasons of the dump of this step."""
        reasons = []
        for text, step in self._found:
            place = "" if step == dumped else f", found at step {step}"
            reasons.append(f"{text}{place}")
        return reasons

    def step_made(self, made: MadeStep) -> None:
        """The step is made and judged, as far as it can be by now: write the copy."""
        self._keep_facts(made)
        self.dump_kept()
        if self._staged is not None:
            job, facts = self._staged
            self._staged = None
            if facts.gradient == TRUE_GRADIENT:
                facts = replace(facts, gradient=made.gradient)
            reason = joined_reasons([facts.reason, *self._reasons(made.step)])
            self._found = []
            self._dumped = made.step
            if reason != SCHEDULE:
                self._bad_dumped = made.step
            late = LateFacts(None if facts.late is None else facts.late.scale, made.clips)
            self._dumper.commit(job, replace(facts, reason=reason, late=late))
            return
        if self._dumper.wants(made.step):
            self._problems.report(
                "dump-missing",
                f"step {made.step} was due for a dump, but at no moment were all its gradients "
                "there at once",
            )
        # Several ranks agree on it at the next look; the true gradient of that step is dumped.
        if self._found and world_size() == 1:
            self._dump_what_is_left(made)

    def _dump_what_is_left(self, made: MadeStep) -> None:
        """What nobody knew early: dump the gradient that the optimizer has left in place."""
        if all(parameter.grad is None for parameter in self._model.parameters()):
            return
        facts = Facts(gradient=_USED, reason=joined_reasons(self._reasons(made.step)))
        self._found = []
        self._bad_dumped = made.step
        if made.remaining == 1.0:
            facts = replace(facts, gradient=made.gradient, clip_coef=1.0)
        elif made.remaining is not None:
            restored = f"{made.gradient}, restored: the clipped one divided by {made.remaining:.6g}"
            facts = replace(
                facts, gradient=restored, divisor=made.remaining, clip_coef=made.clip_coef
            )
        self._dumper.capture(self._model, made.step, facts)

    def close(self) -> None:
        """Wait for the writer, and pass on what went wrong."""
        self._forget()
        self._dumper.wait()
        for problem in self._dumper.problems:
            self._problems.add(replace(problem, key=f"dump-{problem.key}"))

    def _forget(self) -> None:
        if self._staged is not None:
            self._dumper.discard(self._staged[0])
            self._staged = None
