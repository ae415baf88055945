"""A run in numbers, read in one pass: everything that report.md and the commands say. No torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gradsight.errors import GradsightError
from gradsight.show.experts import ExpertNorms, experts_of
from gradsight.show.influence import Influence, influence_of
from gradsight.show.run_statistics import BlockNorms, RunStatistics
from gradsight.store.stat_chunks import StatChunk
from gradsight.values.causes import roots_of
from gradsight.values.diagnoses import Incident
from gradsight.values.dumps import DumpMetadata
from gradsight.values.findings import Finding, Problem
from gradsight.values.first_step import LABEL_SHARE, label_note
from gradsight.values.health_report import (
    SEVERITIES,
    SIGNS,
    Abstention,
    HealthReport,
    ParameterCounts,
    headline,
    make_report,
)
from gradsight.values.histograms import Histogram
from gradsight.values.plain import counted
from gradsight.values.scaling import scaler_note
from gradsight.values.steps import Scalar, Step


class ReadableRun(Protocol):
    """What a report needs of a run."""

    @property
    def config(self) -> dict[str, Any]: ...
    def steps(self) -> Iterable[Step]: ...
    def stat_chunks(self) -> Iterable[StatChunk]: ...
    def histograms(self, parameter: str | None = ...) -> Iterable[Histogram]: ...
    def histogram_steps(self) -> list[int]: ...
    def histograms_at(self, steps: Iterable[int]) -> Iterable[Histogram]: ...
    def problems(self) -> Iterable[Problem]: ...
    def findings(self) -> Iterable[Finding]: ...
    def abstentions(self) -> Iterable[Abstention]: ...
    def incidents(self) -> Iterable[Incident]: ...
    def memory(self) -> Iterable[Scalar]: ...
    def score_table(self) -> tuple[Any, list[str]] | None: ...
    def expert_looks(self) -> Iterable[tuple[int, str, list[float]]]: ...


@dataclass(frozen=True)
class Summary:
    """A run in numbers."""

    steps: list[Step]
    blocks: dict[str, BlockNorms]
    broken: dict[int, list[str]]
    """Steps whose gradient is not finite, with the parameters concerned."""
    histogram: Histogram | None
    problems: list[Problem]
    config: dict[str, Any]
    health: HealthReport
    incidents: list[Incident] = field(default_factory=list)
    samples: Influence | None = None
    """What the samples did to the target with most scores; None where none were scored."""
    memory: list[Scalar] = field(default_factory=list)
    dumps: list[DumpMetadata] = field(default_factory=list)
    received: frozenset[str] = frozenset()
    """Parameters that have had a gradient."""
    experts: dict[str, ExpertNorms] = field(default_factory=dict)
    """Experts of a mixture, by group."""
    failure: str | None = None
    """How the script failed, as `gradsight check` saw it; None if it did not."""

    @property
    def severity(self) -> str:
        """The worst of what was judged and of what can be read off the record."""
        if not self.steps:
            return "warning"
        if self.health.findings:
            return self.health.status
        if self._unhandled:
            return "critical"
        return "healthy"

    @property
    def verdict(self) -> str:
        """The severity as a sentence, and what is behind it."""
        if not self.steps or self.health.findings:
            return headline(self.health)
        bad = self._unhandled
        if bad:
            where = ", ".join(self.broken[bad[0]][:3])
            steps = f"{counted(len(bad), 'step')}, first at step {bad[0]} in {where}"
            return f"{SIGNS['critical']} NaN or Inf in the gradient of {steps}"
        if not self.is_judged:
            return (
                f"{SIGNS['healthy']} {counted(len(self.steps), 'step')}, not judged: health=False"
            )
        return headline(self.health, failed=self.failure is not None)

    @property
    def sentence(self) -> str:
        """The verdict as one plain sentence: the worst finding, since when, and how many more."""
        findings = self.health.findings
        if self.failure is not None and self.severity == "healthy":
            return self.failure
        if not findings:
            # The sign in front of it is for those who read a terminal.
            text = self.verdict.split(" ", 1)[1]
            return f"{text[:1].upper()}{text[1:]}"
        first = findings[0]
        sentence = f"{first.name[:1].upper()}{first.name[1:]}, first at step {first.first_step:,}"
        others = len(roots_of(findings)) - 1
        if others:
            sentence += f", and {counted(others, 'more finding')}"
        return sentence

    @property
    def exit_code(self) -> int:
        """0 fine; 1 warning, or nothing recorded; 2 critical, or a non-finite gradient."""
        return SEVERITIES.index(self.severity)

    @property
    def _unhandled(self) -> list[int]:
        """Steps that were made with a gradient that is not finite."""
        return [step.step for step in self.steps if step.step in self.broken and not step.skipped]

    @property
    def is_judged(self) -> bool:
        """Whether the run was judged: one that was opened with health=False has no verdict."""
        settings = self.config.get("settings", {}).get("watch", {})
        return settings.get("health", True) is not False


def summarize(run: ReadableRun, dumps: Sequence[DumpMetadata] = ()) -> Summary:
    """Read a run once; `dumps` are those that lie beside its record."""
    statistics = RunStatistics()
    for chunk in run.stat_chunks():
        statistics.add(chunk)
    return summary_of(run, list(run.steps()), statistics, dumps)


def summary_of(
    run: ReadableRun,
    steps: list[Step],
    statistics: RunStatistics,
    dumps: Sequence[DumpMetadata] = (),
) -> Summary:
    """The summary of a run whose steps and statistics have been read already."""
    samples, troubles = _samples(run)
    problems = list(run.problems())
    said = {problem.message for problem in problems}
    return Summary(
        steps=steps,
        blocks=statistics.blocks(),
        broken=statistics.broken,
        histogram=_last_histogram(run),
        problems=[*problems, *(each for each in troubles if each.message not in said)],
        config=run.config,
        health=_health(run, steps, statistics.last_counts()),
        incidents=list(run.incidents()),
        samples=samples,
        memory=list(run.memory()),
        dumps=list(dumps),
        received=frozenset(statistics.received),
        experts=experts_of(run),
    )


def _last_histogram(run: ReadableRun) -> Histogram | None:
    """The last one over all parameters; a tracker's, whose steps are others, for want of one."""
    histogram = None
    for step in run.histogram_steps()[-1:]:
        for candidate in run.histograms_at([step]):
            if candidate.parameter is None:
                histogram = candidate
    if histogram is None:
        for candidate in run.histograms(None):
            histogram = candidate
    return histogram


def _samples(run: ReadableRun) -> tuple[Influence | None, list[Problem]]:
    """The influence of the samples, and what stood in the way of reading it."""
    scores = run.score_table()
    if scores is None:
        return None, []
    table, troubles = scores
    samples = None
    try:
        samples = influence_of(table)
    except GradsightError as error:
        troubles = [*troubles, f"the samples' scores cannot be shown: {error}"]
    return samples, [Problem("scores", text, 0, 1) for text in troubles]


def _health(run: ReadableRun, steps: list[Step], counts: ParameterCounts) -> HealthReport:
    """The health report of a record: its findings, and the counts of its last measured step."""
    number = 0
    norm = math.nan
    for step in steps:
        if step.total_norm is not None:
            number = step.step
            norm = step.total_norm
    findings = list(run.findings())
    report = make_report(number, norm, counts, findings, list(run.abstentions()), len(steps))
    left_out = [step.step for step in steps if step.skipped and step.scale is not None]
    shares = (step.scalars[LABEL_SHARE] for step in steps if LABEL_SHARE in step.scalars)
    notes = (
        scaler_note(left_out, steps[-1].step if steps else 0, findings),
        label_note(next(shares, None)),
    )
    return replace(report, notes=tuple(note for note in notes if note is not None))
