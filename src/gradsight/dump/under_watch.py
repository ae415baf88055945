"""Dumps under a watch: copied when a gradient is true, written when its step is made."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from gradsight.core import moments as interception
from gradsight.core.group import world_size
from gradsight.core.problems import Problems
from gradsight.dump.dumper import GradientDumper
from gradsight.dump.job import Facts, Job
from gradsight.measure.norms import Norms
from gradsight.values.findings import Finding

_USED = "as the optimizer used it, after any clipping"
_MIXED = "of several optimizers, as found after the last backward pass"


class Dumping:
    """Hands the gradients of due and of critical steps to a dumper."""

    everywhere = False

    def __init__(
        self, dumper: GradientDumper, model: nn.Module, optimizers: int, problems: Problems
    ) -> None:
        self._dumper, self._model, self._problems = dumper, model, problems
        self._several = optimizers > 1
        self._gradient_when_judged = _USED if optimizers else "true"
        self._step = self._dumped = -1
        self._judged: set[tuple[str, int]] = set()
        self._staged: tuple[Job, Facts] | None = None
        if dumper.dump_on is not None and world_size() > 1:
            problems.report(
                "dump-on", "dump_on needs a run of one process; dumps by schedule go on"
            )

    def look(self, step: int, scaler: torch.amp.GradScaler | None, norms: Norms | None) -> None:
        """The gradients are true now; a later look of the same step replaces this one."""
        critical = norms is not None and norms.counts is not None
        severity = "critical" if critical and world_size() == 1 else None
        if not self._dumper.wants(step, severity) or interception.inside_backward():
            return
        self._forget()
        scale = None if scaler is None else float(scaler.get_scale())
        reason = "schedule" if self._dumper.wants(step) else f"{severity} finding"
        facts = Facts(
            gradient=_MIXED if self._several else "true",
            reason=reason,
            scale=scale,
            divisor=scale or 1.0,
        )
        job = self._dumper.stage(self._model, step, facts)
        self._staged = None if job is None else (job, facts)

    def before_update(self, step: int, total: float, clip_coef: Callable[[], float | None]) -> None:
        """Copied already."""

    def end_step(self, step: int, gradient: str, clip_coef: Callable[[], float | None]) -> None:
        """The step is made: what was copied for it is written."""
        self._step = step
        if self._staged is None:
            if self._dumper.wants(step):
                text = f"step {step} was due for a dump, but at no moment were all its gradients there at once"
                self._problems.report("dump-missing", text)
            return
        (job, facts), self._staged = self._staged, None
        if facts.gradient == "true":
            facts = replace(facts, gradient=gradient)
        self._dumper.commit(job, replace(facts, clip_coef=clip_coef()))
        self._dumped = step

    def judged(self, finding: Finding) -> None:
        """A step was judged: dump it once per new finding that is bad enough, from what the
        optimizer has left in place.
        """
        key = (finding.code, finding.first_step)
        if key in self._judged or world_size() > 1:
            return
        self._judged.add(key)
        there = any(parameter.grad is not None for parameter in self._model.parameters())
        if (
            there
            and self._step != self._dumped
            and self._dumper.wants(self._step, finding.severity)
        ):
            self._dumped = self._step
            reason = f"{finding.code} {finding.name}"
            self._dumper.capture(
                self._model, self._step, Facts(gradient=self._gradient_when_judged, reason=reason)
            )

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
