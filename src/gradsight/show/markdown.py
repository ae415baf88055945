"""report.md: what a run's gradients did, for someone who has one minute."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from gradsight.errors import GradsightError
from gradsight.show.figures import bar, figure, sparkline
from gradsight.show.influence import Influence, influence
from gradsight.show.samples import TextOf, markdown_section
from gradsight.values.diagnoses import Incident
from gradsight.values.findings import Finding
from gradsight.values.health_report import (
    SEVERITIES,
    Abstention,
    HealthReport,
    headline,
    make_report,
    markdown_sections,
)
from gradsight.values.histograms import Histogram
from gradsight.values.problems import Problem
from gradsight.values.steps import ParameterStat, Step, block_of
from gradsight.values.wording import describe

_MOST_ROWS = 40
_NAMED = 8


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
    def score_table(self) -> tuple[Any, list[str]] | None: ...


@dataclass
class _Block:
    """The norm of one block over the steps."""

    squares: dict[int, float] = field(default_factory=dict)
    largest: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def add(self, stat: ParameterStat) -> None:
        self.squares[stat.step] = self.squares.get(stat.step, 0.0) + stat.l2**2
        if math.isfinite(stat.max_abs):
            self.largest = max(self.largest, stat.max_abs)
        if stat.update_ratio is not None:
            self.ratios.append(stat.update_ratio)

    @property
    def norms(self) -> list[float]:
        return [
            math.sqrt(square) if square == square else math.nan for square in self.squares.values()
        ]


@dataclass
class Summary:
    """A run in numbers: everything the report says, gathered in one pass."""

    steps: list[Step]
    blocks: dict[str, _Block]
    broken: dict[int, list[str]]
    """Steps whose gradient is not finite, with the parameters concerned."""
    histogram: Histogram | None
    problems: list[Problem]
    config: dict[str, Any]
    health: HealthReport
    incidents: list[Incident] = field(default_factory=list)
    samples: Influence | None = None
    """What the samples did to the target with most scores; None where none were scored."""

    @property
    def verdict(self) -> str:
        """One line: the worst of what was judged and of what can be read off the record."""
        if not self.steps:
            return "⚠️ nothing was recorded"
        if self.health.findings:
            return headline(self.health)
        unhandled = [
            step.step for step in self.steps if step.step in self.broken and not step.skipped
        ]
        if unhandled:
            where = ", ".join(self.broken[unhandled[0]][:3])
            return f"❌ NaN or Inf in the gradient of {len(unhandled)} steps, first at step {unhandled[0]} in {where}"
        return f"✅ every gradient of {len(self.steps)} steps is finite"

    @property
    def exit_code(self) -> int:
        """0 fine; 1 a warning, or nothing recorded; 2 something critical, or a gradient that is not
        finite.
        """
        return {"✅": 0, "⚠": 1, "❌": 2}[self.verdict[0]]


def summarize(run: ReadableRun) -> Summary:
    """Read a run once."""
    blocks: dict[str, _Block] = {}
    broken: dict[int, list[str]] = {}
    last: list[ParameterStat] = []
    for stat in run.parameter_stats():
        if last and last[0].step != stat.step:
            last.clear()
        last.append(stat)
        blocks.setdefault(block_of(stat.parameter), _Block()).add(stat)
        if stat.nan != 0 or stat.inf != 0:
            broken.setdefault(stat.step, []).append(stat.parameter)
    histogram = None
    for histogram in run.histograms(None):  # noqa: B007
        pass
    steps = list(run.steps())
    health = _health(run, steps, last)
    samples, troubles = _samples(run)
    problems, incidents = [*run.problems(), *troubles], list(run.incidents())
    return Summary(
        steps, blocks, broken, histogram, problems, run.config, health, incidents, samples
    )


def _samples(run: ReadableRun) -> tuple[Influence | None, list[Problem]]:
    """The influence of the samples, and what stood in the way of reading it."""
    found = run.score_table()
    if found is None:
        return None, []
    table, troubles = found
    samples = None
    try:
        samples = influence(table)
    except GradsightError as error:
        troubles = [*troubles, f"the samples' scores cannot be shown: {error}"]
    return samples, [Problem("scores", text, 0, 1) for text in troubles]


def _health(run: ReadableRun, steps: list[Step], last: list[ParameterStat]) -> HealthReport:
    """The health report of a record: its findings, and the counts of its last measured step."""
    nan, inf, zero = (sum(test(stat) for stat in last) for test in (_has_nan, _has_inf, _is_zero))
    measured = [step for step in steps if step.total_norm is not None]
    number, norm = (measured[-1].step, measured[-1].total_norm or 0.0) if measured else (0, 0.0)
    findings = sorted(
        run.findings(),
        key=lambda each: (-SEVERITIES.index(each.severity), each.first_step, each.code),
    )
    return make_report(
        number, norm, (nan, inf, zero, len(last)), findings, list(run.abstentions()), len(steps)
    )


def _has_nan(stat: ParameterStat) -> bool:
    return stat.nan != 0


def _has_inf(stat: ParameterStat) -> bool:
    return stat.inf != 0


def _is_zero(stat: ParameterStat) -> bool:
    return stat.l2 == 0


def report(summary: Summary, text_of: TextOf = lambda sample_id: None) -> str:
    """The whole report as markdown; text_of gives the samples' text, where it is known."""
    sections = [["# Gradsight report", "", f"**{summary.verdict}**"], _overview(summary)]
    if (
        summary.steps
        and summary.config.get("settings", {}).get("watch", {}).get("health", True) is not False
    ):
        sections += markdown_sections(summary.health)
    sections.append(_block_table(summary))
    if summary.samples is not None:
        sections.append(markdown_section(summary.samples, text_of))
    sections += [
        _histogram(summary.histogram),
        _broken(summary),
        _incidents(summary),
        _problems(summary.problems),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _overview(summary: Summary) -> list[str]:
    if not summary.steps:
        return []
    steps = summary.steps
    norms = [step.total_norm for step in steps if step.total_norm is not None]
    rows = [
        ("Steps", f"{steps[0].step} to {steps[-1].step}"),
        ("Loss", _from_to([step.loss for step in steps])),
    ]
    rows.append(
        ("Total gradient norm", f"{_from_to(norms)} `{sparkline(norms)}`" if norms else "–")
    )
    rows.append(("Learning rate", _from_to([step.lr for step in steps])))
    clipped = [step for step in steps if step.clip_coef is not None and step.clip_coef < 1]
    rows.append(("Steps with clipping", f"{len(clipped)} of {len(steps)}"))
    skipped = sum(step.skipped for step in steps)
    if skipped:
        rows.append(("Steps left out by the GradScaler", str(skipped)))
    within = [
        step.scalars["gradients/share_within_0.1"]
        for step in steps
        if "gradients/share_within_0.1" in step.scalars
    ]
    if within:
        rows.append(("Entries within ±0.1", f"{within[-1]:.1%} at the last look"))
    parameters = summary.config.get("parameters", [])
    frozen = sum(not parameter.get("trainable", True) for parameter in parameters)
    if frozen:
        rows.append(("Frozen parameters", f"{frozen} of {len(parameters)}"))
    rows.append(("Measured on", _measured_on(steps, summary.config)))
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]


def _measured_on(steps: list[Step], config: dict[str, Any]) -> str:
    other = [step for step in steps if step.gradient != "true"]
    text = f"the gradient {config.get('gradient', '')}".strip()
    if other:
        kinds = sorted({step.gradient for step in other})
        text += f"; but on {len(other)} steps: {', '.join(kinds)}"
    return text


def _from_to(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{figure(known[0])} → {figure(known[-1])}" if known else "–"


def _block_table(summary: Summary) -> list[str]:
    if not summary.blocks:
        return []
    lines = [
        "## Gradient norms by block",
        "",
        "| block | first | median | last | largest entry | update/weight | over time |",
    ]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    shown = list(summary.blocks.items())[:_MOST_ROWS]
    for name, block in shown:
        norms = block.norms
        finite = [norm for norm in norms if math.isfinite(norm)]
        ratio = figure(median(block.ratios)) if block.ratios else "–"
        middle = figure(median(finite)) if finite else "–"
        cells = [
            f"`{name}`",
            figure(norms[0]),
            middle,
            figure(norms[-1]),
            figure(block.largest),
            ratio,
            f"`{sparkline(norms)}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if len(summary.blocks) > len(shown):
        lines.append(f"\n{len(summary.blocks) - len(shown)} more blocks are in the record.")
    return lines


def _histogram(histogram: Histogram | None) -> list[str]:
    """Magnitudes by power of ten would hide the shape; powers of two in pairs fit a page."""
    if histogram is None:
        return []
    title = f"## All gradient entries at step {histogram.step}"
    sampled = f"sampled: {histogram.sampled:,} of {histogram.size:,}, standard error of a share at most {histogram.error:.2%}"
    exact = f"all {histogram.size:,} counted"
    total = sum(histogram.positive) + sum(histogram.negative) + histogram.zero + histogram.underflow
    lines = [
        title,
        "",
        sampled if histogram.error else exact,
        "",
        "```",
        f"{'magnitude':>12}  share",
    ]
    rows = list(
        zip(
            range(histogram.low, histogram.low + len(histogram.positive)),
            histogram.negative,
            histogram.positive,
            strict=True,
        )
    )
    if not rows or not total:
        return [*lines[:3], "every entry is zero or not finite"]
    grouped = [rows[start : start + 2] for start in range(0, len(rows), 2)]
    shares = [
        sum(negative + positive for _, negative, positive in group) / total for group in grouped
    ]
    top = max(shares)
    for group, share in zip(grouped, shares, strict=True):
        if share >= 0.0005:
            lines.append(
                f"{'≥ ' + figure(2.0 ** group[0][0]):>12}  {share:6.1%} {bar(share / top)}"
            )
    zero = (histogram.zero + histogram.underflow) / total
    lines.append(f"{'zero':>12}  {zero:6.1%} {bar(min(1.0, zero / top))}")
    return [*lines, "```"]


def _broken(summary: Summary) -> list[str]:
    if not summary.broken:
        return []
    lines = ["## Steps whose gradient is not finite", ""]
    skipped = {step.step for step in summary.steps if step.skipped}
    for step, names in list(summary.broken.items())[:_NAMED]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        note = " (left out by the GradScaler)" if step in skipped else ""
        lines.append(f"- step {step}{note}: {', '.join(f'`{name}`' for name in names[:3])}{more}")
    if len(summary.broken) > _NAMED:
        lines.append(f"- and {len(summary.broken) - _NAMED} more steps")
    return lines


def _incidents(summary: Summary) -> list[str]:
    """The flight recorder's bundles; what a finding has said already is not said again."""
    if not summary.incidents:
        return []
    lines = ["## Incidents", ""]
    said = {finding.incident for finding in summary.health.findings}
    for incident in summary.incidents:
        place = f"incidents/step{incident.step}-{incident.code}"
        again = "; `gradsight replay` can run it again" if incident.replayable else ""
        what = incident.damage or incident.reason
        lines.append(f"- step {incident.step}, {incident.code}: {what} (`{place}`{again})")
        if incident.diagnosis is not None and place not in said:
            lines += [f"  - {line}" for line in describe(incident.diagnosis, width=10_000)]
    return lines


def _problems(problems: list[Problem]) -> list[str]:
    if not problems:
        return []
    lines = ["## What Gradsight could not do", ""]
    return lines + [
        f"- {problem.message} (from step {problem.first_step}, {problem.count}x)"
        for problem in problems
    ]
