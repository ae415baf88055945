"""Dumps under a watch: copied when a gradient is true, written when its step is made."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from gradsight.core import moments
from gradsight.core.group import world_size
from gradsight.core.problems import Problems
from gradsight.dump.dumper import GradientDumper
from gradsight.dump.job import Facts, Job
from gradsight.values.findings import Finding
from gradsight.values.measured import Norms
from gradsight.values.steps import TRUE_GRADIENT

_USED = "as the optimizer used it, after any clipping"
_MIXED = "of several optimizers, as found after the last backward pass"


class WatchedDumps:
    """Hands the gradients of due and of critical steps to a dumper."""

    def __init__(
        self, dumper: GradientDumper, model: nn.Module, optimizers: int, problems: Problems
    ) -> None:
        self._dumper = dumper
        self._model = model
        self._problems = problems
        self._several = optimizers > 1
        self._gradient_when_judged = _USED if optimizers else TRUE_GRADIENT
        self._step = -1
        self._dumped = -1
        self._judged: set[tuple[str, int]] = set()
        self._staged: tuple[Job, Facts] | None = None
        if dumper.dump_on is not None and world_size() > 1:
            problems.report(
                "dump-on", "dump_on needs a run of one process; dumps by schedule go on"
            )

    @property
    def is_staged(self) -> bool:
        """Whether gradients of the step under way were copied."""
        return self._staged is not None

    def gradients_ready(
        self, step: int, scaler: torch.amp.GradScaler | None, norms: Norms | None
    ) -> None:
        """The gradients are true now; a later look of the same step replaces this one."""
        broken = norms is not None and norms.counts is not None
        severity = "critical" if broken and world_size() == 1 else None
        if not self._dumper.wants(step, severity) or moments.inside_backward():
            return
        self._forget()
        scale = None if scaler is None else float(scaler.get_scale())
        reason = "schedule" if self._dumper.wants(step) else f"{severity} finding"
        facts = Facts(
            gradient=_MIXED if self._several else TRUE_GRADIENT,
            reason=reason,
            scale=scale,
            divisor=scale or 1.0,
        )
        job = self._dumper.stage(self._model, step, facts)
        if job is not None:
            self._staged = (job, facts)

    def step_made(self, step: int, gradient: str, clip_coef: float | None) -> None:
        """The step is made, and `gradient` says what its gradients were: write the copy."""
        self._step = step
        if self._staged is None:
            if self._dumper.wants(step):
                self._problems.report(
                    "dump-missing",
                    f"step {step} was due for a dump, but at no moment were all its gradients "
                    "there at once",
                )
            return
        job, facts = self._staged
        self._staged = None
        if facts.gradient == TRUE_GRADIENT:
            facts = replace(facts, gradient=gradient)
        self._dumper.commit(job, replace(facts, clip_coef=clip_coef))
        self._dumped = step

    def judged(self, findings: Sequence[Finding]) -> None:
        """Dump the step once per new finding that is bad enough.

        What is dumped is what the optimizer has left in place.
        """
        for finding in findings:
            key = (finding.code, finding.first_step)
            if key in self._judged or world_size() > 1:
                continue
            self._judged.add(key)
            if self._step == self._dumped or not self._dumper.wants(self._step, finding.severity):
                continue
            if any(parameter.grad is not None for parameter in self._model.parameters()):
                self._dumped = self._step
                reason = f"{finding.code} {finding.name}"
                facts = Facts(gradient=self._gradient_when_judged, reason=reason)
                self._dumper.capture(self._model, self._step, facts)

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
