"""The Gradient Health Report: what one look or a whole run comes to, and how it reads. No torch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsight.values.causes import Group, groups, roots_of, with_causes
from gradsight.values.findings import PRECISION, RANKS_AND_DATA, TREND, WIRING, Finding
from gradsight.values.notebook import html_card
from gradsight.values.plain import counted, listed, plain, quoted
from gradsight.values.texts import (
    cleaned,
    fenced,
    for_markdown,
    for_terminal,
    in_code,
    on_one_line,
)
from gradsight.values.wording import markdown_lines

SEVERITIES = ("healthy", "warning", "critical")
SIGNS = {"healthy": "✅", "warning": "⚠️", "critical": "❌"}
_KEYS = ("total_norm", "nan_count", "zero_count", "num_params")
_OF_THE_NORM = {"GS101", "GS102", "GS103", "GS104", "GS105", "GS106"}
_NAMED = 4
_NO_STEPS = "no steps: no optimizer step was seen"
_MOST_FINDINGS = 200
_WHY_NO_STEPS = (
    "A watch sees a step when the optimizer that it was given steps; without an optimizer, when "
    "`Watch.step()` is called after backward. Was it given the model and the optimizer that are "
    "trained? (Hugging Face's Trainer makes its optimizer in `train()`.)"
)


@dataclass(frozen=True, slots=True)
class Abstention:
    """A check that could not judge, and why."""

    code: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class HealthReport(Mapping[str, float]):
    """A verdict on gradients. The counts are of parameters, at the last step that was measured.

    Where no step was seen there is nothing to call healthy: the status is "warning". Its four
    numbers can be read by key too: `report["total_norm"]`, `dict(report)`; all else by attribute.
    """

    step: int
    status: str
    """ "healthy", "warning" or "critical"."""
    total_norm: float
    """NaN where no gradient was measured."""
    nan_count: int
    inf_count: int
    zero_count: int
    num_params: int
    """How many parameters have a gradient."""
    findings: tuple[Finding, ...] = ()
    """All of them, each right after the one that it follows from."""
    abstained: tuple[Abstention, ...] = ()
    steps: int = 1
    """How many steps were judged."""
    notes: tuple[str, ...] = ()
    """What is no fault, but may look like one."""

    def __getitem__(self, key: str) -> float:
        if key not in _KEYS:
            raise KeyError(f"a health report has no key {key!r}; it has {', '.join(_KEYS)}")
        value: float = getattr(self, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)

    def __str__(self) -> str:
        if self.steps == 0:
            return _NO_STEPS
        if self.num_params == 0:
            return f"Step {self.step}: {_nothing_counted(self)}"
        norm = f"grad_norm={self.total_norm:.4f}"
        return f"Step {self.step}: {norm}, nan={self.nan_count}, zero={self.zero_count}"

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 warning, 2 critical."""
        return SEVERITIES.index(self.status)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: what is not finite is the text "nan", "inf" or "-inf"."""
        values: dict[str, Any] = plain(self)
        return values

    def to_markdown(self) -> str:
        """The report under its headings: Summary, Issues Detected, Recommendations, Code to Add."""
        return "\n\n".join("\n".join(part) for part in markdown_sections(self)) + "\n"

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = [
            (
                finding.code,
                finding.name,
                finding.severity,
                finding.first_step,
                finding.evidence,
                finding.caused_by or "",
            )
            for finding in self.findings
        ]
        headings = ("code", "finding", "severity", "since step", "evidence", "follows from")
        return html_card(headline(self), rows, headings, str(self))


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """How many parameters have a gradient, and how many of those are broken or zero."""

    nan: int
    inf: int
    zero: int
    parameters: int


def worst(severities: Iterable[str]) -> str:
    """The worst of some severities; "healthy" where there are none.

    >>> worst(["warning", "critical", "warning"]), worst([])
    ('critical', 'healthy')
    """
    return max(severities, key=SEVERITIES.index, default="healthy")


def make_report(
    step: int,
    total_norm: float,
    counts: ParameterCounts,
    findings: Sequence[Finding],
    abstained: Sequence[Abstention] = (),
    steps: int = 1,
) -> HealthReport:
    """A report whose status is that of its worst finding."""
    findings = ordered(findings)
    status = worst(finding.severity for finding in findings)
    if steps == 0:
        status = worst([status, "warning"])
        total_norm = math.nan
    return HealthReport(
        step=step,
        status=status,
        total_norm=total_norm,
        nan_count=counts.nan,
        inf_count=counts.inf,
        zero_count=counts.zero,
        num_params=counts.parameters,
        findings=tuple(findings),
        abstained=tuple(abstained),
        steps=steps,
    )


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Findings with their causes: the worst group first, then the earliest; causes lead them."""
    found = groups(sorted(with_causes(findings), key=_rank))
    found.sort(key=_rank_of_group)
    return [each for group in found for each in (group.root, *group.consequences)]


def _rank(finding: Finding) -> tuple[int, int, str]:
    return -SEVERITIES.index(finding.severity), finding.first_step, finding.code


def _rank_of_group(group: Group) -> tuple[int, int, str]:
    return -SEVERITIES.index(group.worst.severity), group.root.first_step, group.root.code


def markdown_sections(report: HealthReport) -> list[list[str]]:
    """The lines of each section, in order."""
    sections = [["## Gradient Health Report"], _summary(report), _issues(report)]
    sections += [_recommendations(report), _code(report), _abstained(report)]
    return [section for section in sections if section]


def headline(report: HealthReport, failed: bool = False) -> str:
    """The verdict in one line; a script that failed is not called healthy."""
    if report.steps == 0:
        return f"{SIGNS[report.status]} {_NO_STEPS}"
    sign = SIGNS[report.status]
    over = f"step {report.step}"
    if report.steps > 1:
        over = f"{report.steps} steps"
    if not report.findings:
        if failed:
            return f"No finding in {over} before the failure"
        return f"{sign} healthy: no finding in {over}"
    return f"{sign} {report.status}: {counted_causes(report.findings)} in {over}"


def counted_causes(findings: Sequence[Finding]) -> str:
    """How many findings there are that follow from none, and how many follow from these."""
    roots = len(roots_of(findings))
    text = counted(roots, "finding")
    more = len(findings) - roots
    if not more:
        return text
    verb = "follows" if more == 1 else "follow"
    return f"{text} ({more} more {verb} from {'it' if roots == 1 else 'them'})"


def _summary(report: HealthReport) -> list[str]:
    if report.steps == 0:
        return ["### Summary", "", f"{headline(report)}. {_WHY_NO_STEPS}"]
    if report.num_params == 0:
        sign = SIGNS[worst([report.status, "warning"])]
        return ["### Summary", "", f"{sign} Step {report.step}: {_nothing_counted(report)}."]
    lines = ["### Summary", "", "| Metric | Value | Status |", "|--------|-------|--------|"]
    for metric, value, status in _summary_rows(report):
        lines.append(f"| {metric} | {value} | {SIGNS[status]} |")
    measured = f"At step {report.step}, over {report.num_params} parameters with a gradient."
    notes = [line for note in report.notes for line in ("", for_markdown(_sentence(note)))]
    return [*lines, "", measured, *notes]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _nothing_counted(report: HealthReport) -> str:
    """Why there is no parameter to count."""
    if math.isnan(report.total_norm):
        return "no gradient was measured"
    return "no parameter has a gradient"


def _summary_rows(report: HealthReport) -> list[tuple[str, str, str]]:
    """Metric, value and status, by row."""
    norm = report.total_norm
    zero_share = report.zero_count / max(1, report.num_params)
    rows = [
        ("Total grad norm", f"{norm:.4g}", _norm_status(report)),
        ("NaN parameters", str(report.nan_count), _status("critical", report.nan_count > 0)),
        ("Inf parameters", str(report.inf_count), _status("critical", report.inf_count > 0)),
        # Half, as GS107 has it.
        ("Zero-grad parameters", f"{zero_share:.0%}", _status("warning", zero_share > 0.5)),
    ]
    if report.steps > 1:
        trends = [finding for finding in report.findings if finding.family == TREND]
        names = for_markdown(", ".join(finding.name for finding in trends))
        rows.append(("Trend", names or "stable", worst(each.severity for each in trends)))
    families = (WIRING, PRECISION, RANKS_AND_DATA)
    others = [finding for finding in report.findings if finding.family in families]
    if others:
        status = worst(finding.severity for finding in others)
        rows.append(("Wiring, precision, data", counted(len(others), "finding"), status))
    return rows


def _status(bad: str, is_bad: bool) -> str:
    return bad if is_bad else "healthy"


def _norm_status(report: HealthReport) -> str:
    norm = report.total_norm
    if report.steps > 1 and math.isfinite(norm):
        # A run is judged by what its steps do: of a loss that is a sum, a large norm is a unit.
        return worst(each.severity for each in report.findings if each.code in _OF_THE_NORM)
    # The limits that GS102, GS101 and GS105 have unless they are set otherwise.
    if not math.isfinite(norm) or norm > 1000 or norm == 0:
        return "critical"
    return _status("warning", norm > 100 or norm < 0.001)


def _issues(report: HealthReport) -> list[str]:
    if report.steps == 0:
        return []
    if not report.findings:
        return ["### Issues Detected", "", "None."]
    lines = ["### Issues Detected", ""]
    # Four spaces: some readers of Markdown take fewer for no list inside a list.
    shown = groups(report.findings[:_MOST_FINDINGS])
    for number, group in enumerate(shown, 1):
        first, *rest = _issue(group.root, group.worst)
        lines += [f"{number}. {first}", *(f"    {line}" for line in rest)]
        for consequence in group.consequences:
            first, *rest = _issue(consequence)
            lines += [f"    - It follows: {first}", *(f"        {line}" for line in rest)]
    return lines + _and_more(len(report.findings), _MOST_FINDINGS)


def _issue(finding: Finding, worst: Finding | None = None) -> list[str]:
    """A finding as an item of a list: what it is, then its own items.

    worst: the most severe finding of its group, if the finding is a root.
    """
    shown = cleaned(finding, for_markdown)
    title = f"{SIGNS[(worst or finding).severity]} **{shown.code} {shown.name}**"
    since = f"({finding.severity}, since step {finding.first_step}"
    if worst is not None and worst is not finding:
        since += f"; leads to {for_markdown(worst.code)}, which is {worst.severity}"
    since += ")"
    lines = [f"{title} {since}: {shown.message}", f"- Evidence: {shown.evidence}"]
    if finding.parameters:
        lines.append(f"- Affected layers: {listed(quoted(finding.parameters), _NAMED)}")
    lines += _cause(finding)
    lines.append(f"- More: `gradsight explain {in_code(finding.code)}`")
    return lines


def _and_more(count: int, most: int) -> list[str]:
    """A line for those that a page has no room for; only a crafted run has so many."""
    if count <= most:
        return []
    return ["", f"{count - most} more are in the record."]


def _cause(finding: Finding) -> list[str]:
    """The lines of a finding's diagnosis, and the place of its incident; empty without either."""
    lines = []
    if finding.diagnosis is not None:
        first, *rest = markdown_lines(finding.diagnosis)
        lines.append(f"- Cause: {first}")
        lines += [f"    - {line}" for line in rest]
    if finding.incident is not None:
        lines.append(f"- Kept in `{in_code(finding.incident)}`")
    return lines


def _recommendations(report: HealthReport) -> list[str]:
    if report.steps == 0:
        return []
    if not report.findings:
        return ["### Recommendations", "", "None needed."]
    shown = roots_of(report.findings[:_MOST_FINDINGS])
    lines = [
        f"{number}. {for_markdown(finding.code)}: {for_markdown(finding.recommendation)}"
        for number, finding in enumerate(shown, 1)
    ]
    return ["### Recommendations", "", *lines]


def _code(report: HealthReport) -> list[str]:
    """Every fix once, under the codes that it helps; consequences go with their cause."""
    codes: dict[str, list[str]] = {}
    for finding in roots_of(report.findings[:_MOST_FINDINGS]):
        if finding.fix:
            codes.setdefault(finding.fix, []).append(f"{finding.code} {finding.name}")
    if not codes:
        return []
    code = []
    for fix, names in codes.items():
        code += [f"# --- {on_one_line(', '.join(names))}", *for_terminal(fix).splitlines(), ""]
    return ["### Code to Add", "", *fenced(code[:-1], "python")]


def _abstained(report: HealthReport) -> list[str]:
    if not report.abstained or report.steps <= 1:
        return []
    reasons: dict[str, list[str]] = {}
    for each in report.abstained:
        reasons.setdefault(each.reason, []).append(f"{each.code} {each.name}")
    lines = [
        f"- {for_markdown(', '.join(names))}: {for_markdown(reason)}"
        for reason, names in list(reasons.items())[:_MOST_FINDINGS]
    ]
    return ["### Checks that abstained", "", *lines]
