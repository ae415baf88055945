"""A run in numbers, read in one pass: everything that report.md and the commands say. No torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradsight.errors import GradsightError
from gradsight.show.influence import Influence, influence_of
from gradsight.values.diagnoses import Incident
from gradsight.values.dumps import DumpMetadata
from gradsight.values.findings import Finding, Problem
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
from gradsight.values.steps import ParameterStat, Scalar, Step, block_of


class ReadableRun(Protocol):
    """What a report needs of a run."""

    @property
    def config(self) -> dict[str, Any]: ...
    def steps(self) -> Iterable[Step]: ...
    def parameter_stats(self) -> Iterable[ParameterStat]: ...
    def histograms(self, parameter: str | None = ...) -> Iterable[Histogram]: ...
    def problems(self) -> Iterable[Problem]: ...
    def findings(self) -> Iterable[Finding]: ...
    def abstentions(self) -> Iterable[Abstention]: ...
    def incidents(self) -> Iterable[Incident]: ...
    def memory(self) -> Iterable[Scalar]: ...
    def score_table(self) -> tuple[Any, list[str]] | None: ...


@dataclass
class BlockNorms:
    """The gradient norm of one block over the steps, added up parameter by parameter."""

    squares: dict[int, float] = field(default_factory=dict)
    largest: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def add(self, stat: ParameterStat) -> None:
        """One parameter's gradient at one step."""
        # A product, not a power: x**2 raises where the square is beyond the largest number.
        self.squares[stat.step] = self.squares.get(stat.step, 0.0) + stat.l2 * stat.l2
        if math.isfinite(stat.max_abs):
            self.largest = max(self.largest, stat.max_abs)
        if stat.update_ratio is not None:
            self.ratios.append(stat.update_ratio)

    @property
    def norms(self) -> list[float]:
        """The norm at every step."""
        return [math.sqrt(square) for square in self.squares.values()]


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
        return headline(self.health)

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
    # In one pass: a long run has millions of rows, and only what is added up of them is kept.
    blocks: dict[str, BlockNorms] = {}
    broken: dict[int, list[str]] = {}
    last: list[ParameterStat] = []
    for stat in run.parameter_stats():
        if last and last[0].step != stat.step:
            last.clear()
        last.append(stat)
        blocks.setdefault(block_of(stat.parameter), BlockNorms()).add(stat)
        if stat.nan != 0 or stat.inf != 0:
            broken.setdefault(stat.step, []).append(stat.parameter)
    histogram: Histogram | None = None
    for candidate in run.histograms(None):
        # The last one is shown; a tracker's, whose steps are others, only where there is no other.
        if histogram is None or candidate.source == "watch" or histogram.source == "tracker":
            histogram = candidate
    steps = list(run.steps())
    samples, troubles = _samples(run)
    return Summary(
        steps=steps,
        blocks=blocks,
        broken=broken,
        histogram=histogram,
        problems=[*run.problems(), *troubles],
        config=run.config,
        health=_health(run, steps, last),
        incidents=list(run.incidents()),
        samples=samples,
        memory=list(run.memory()),
        dumps=list(dumps),
    )


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


def _health(run: ReadableRun, steps: list[Step], last: list[ParameterStat]) -> HealthReport:
    """The health report of a record: its findings, and the counts of its last measured step."""
    counts = ParameterCounts(
        nan=sum(stat.nan != 0 for stat in last),
        inf=sum(stat.inf != 0 for stat in last),
        zero=sum(stat.l2 == 0 for stat in last),
        parameters=len(last),
    )
    number = 0
    norm = math.nan
    for step in steps:
        if step.total_norm is not None:
            number = step.step
            norm = step.total_norm
    return make_report(
        number, norm, counts, sorted(run.findings(), key=_rank), list(run.abstentions()), len(steps)
    )


def _rank(finding: Finding) -> tuple[int, int, str]:
    """The worst first, then the earliest."""
    return -SEVERITIES.index(finding.severity), finding.first_step, finding.code
