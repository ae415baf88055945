"""The Gradient Health Report: what one look or a whole run comes to, and how it reads. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradsight.values.findings import Finding
from gradsight.values.plain import plain
from gradsight.values.wording import describe

SEVERITIES = ("healthy", "warning", "critical")
SIGNS = {"healthy": "✅", "warning": "⚠️", "critical": "❌"}
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Abstention:
    """A check that could not judge, and why."""

    code: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class HealthReport:
    """A verdict on gradients. The counts are of parameters, at the last step that was seen."""

    step: int
    status: str
    """ "healthy", "warning" or "critical"."""
    total_norm: float
    nan_count: int
    inf_count: int
    zero_count: int
    num_params: int
    """How many parameters have a gradient."""
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstention, ...] = ()
    steps: int = 1
    """How many steps were judged."""

    def __str__(self) -> str:
        return f"Step {self.step}: grad_norm={self.total_norm:.4f}, nan={self.nan_count}, zero={self.zero_count}"

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 warning, 2 critical."""
        return SEVERITIES.index(self.status)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: what is not finite is the text "nan", "inf" or "-inf"."""
        found: dict[str, Any] = plain(self)
        return found

    def to_markdown(self) -> str:
        """The report under its headings: Summary, Issues Detected, Recommendations, Code to Add."""
        return "\n\n".join("\n".join(part) for part in markdown_sections(self)) + "\n"


def make_report(
    step: int,
    total_norm: float,
    counts: tuple[int, int, int, int],
    findings: Sequence[Finding],
    abstained: Sequence[Abstention] = (),
    steps: int = 1,
) -> HealthReport:
    """A report whose status is that of its worst finding; `counts` are NaN, Inf, zero, and
    parameters with a gradient.
    """
    worst = max((SEVERITIES.index(finding.severity) for finding in findings), default=0)
    return HealthReport(
        step, SEVERITIES[worst], total_norm, *counts, tuple(findings), tuple(abstained), steps
    )


def markdown_sections(report: HealthReport) -> list[list[str]]:
    """The lines of each section, in order."""
    sections = [["## Gradient Health Report"], _summary(report), _issues(report)]
    sections += [_recommendations(report), _code(report), _abstained(report)]
    return [section for section in sections if section]


def headline(report: HealthReport) -> str:
    """The verdict in one line."""
    if report.steps == 0:
        return "⚠️ nothing was seen: no optimizer step with a gradient"
    sign = SIGNS[report.status]
    over = f"{report.steps} steps" if report.steps > 1 else f"step {report.step}"
    if not report.findings:
        return f"{sign} healthy: no finding in {over}"
    count = len(report.findings)
    return f"{sign} {report.status}: {count} finding{'s' if count > 1 else ''} in {over}"


def _summary(report: HealthReport) -> list[str]:
    norm, zero_share = report.total_norm, report.zero_count / max(1, report.num_params)
    rows = [
        ("Total grad norm", f"{norm:.4g}", _norm_status(norm)),
        ("NaN parameters", str(report.nan_count), "critical" if report.nan_count else "healthy"),
        ("Inf parameters", str(report.inf_count), "critical" if report.inf_count else "healthy"),
        ("Zero-grad parameters", f"{zero_share:.0%}", "warning" if zero_share > 0.5 else "healthy"),
    ]
    if report.steps > 1:
        trends = [finding for finding in report.findings if finding.code.startswith("GS2")]
        worst = max(
            (finding.severity for finding in trends), key=SEVERITIES.index, default="healthy"
        )
        rows.append(("Trend", ", ".join(finding.name for finding in trends) or "stable", worst))
    others = [finding for finding in report.findings if finding.code[2] in "345"]
    if others:
        worst = max((finding.severity for finding in others), key=SEVERITIES.index)
        rows.append(
            (
                "Wiring, precision, data",
                f"{len(others)} finding{'s' if len(others) > 1 else ''}",
                worst,
            )
        )
    lines = ["### Summary", "", "| Metric | Value | Status |", "|--------|-------|--------|"]
    lines += [f"| {metric} | {value} | {SIGNS[status]} |" for metric, value, status in rows]
    return [
        *lines,
        "",
        f"At step {report.step}, over {report.num_params} parameters with a gradient.",
    ]


def _norm_status(norm: float) -> str:
    if not math.isfinite(norm) or norm > 1000 or norm == 0:
        return "critical"
    return "warning" if norm > 100 or norm < 0.001 else "healthy"


def _issues(report: HealthReport) -> list[str]:
    if not report.findings:
        return ["### Issues Detected", "", "None."]
    lines = ["### Issues Detected", ""]
    for number, finding in enumerate(report.findings, 1):
        lines.append(
            f"{number}. {SIGNS[finding.severity]} **{finding.code} {finding.name}** ({finding.severity}, since step"
        )
        lines[-1] += f" {finding.first_step}): {finding.message}"
        lines.append(f"   - Evidence: {finding.evidence}")
        if finding.parameters:
            lines.append(f"   - Affected layers: {shortened(finding.parameters)}")
        lines += _cause(finding)
    return lines


def _cause(finding: Finding) -> list[str]:
    """What a finding's diagnosis found, and where its incident is kept; empty where there is
    neither.
    """
    told = describe(finding.diagnosis, width=10_000) if finding.diagnosis is not None else []
    lines = [
        f"   - Cause: {line}" if number == 0 else f"     - {line}"
        for number, line in enumerate(told)
    ]
    return [*lines, f"   - Kept in `{finding.incident}`"] if finding.incident is not None else lines


def shortened(names: Sequence[str], most: int = _NAMED) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


def _recommendations(report: HealthReport) -> list[str]:
    if not report.findings:
        return ["### Recommendations", "", "None needed."]
    lines = [
        f"{number}. {finding.code}: {finding.recommendation}"
        for number, finding in enumerate(report.findings, 1)
    ]
    return ["### Recommendations", "", *lines]


def _code(report: HealthReport) -> list[str]:
    """Every fix once, under the codes that it helps."""
    codes: dict[str, list[str]] = {}
    for finding in report.findings:
        if finding.fix:
            codes.setdefault(finding.fix, []).append(f"{finding.code} {finding.name}")
    if not codes:
        return []
    lines = ["### Code to Add", "", "```python"]
    for fix, names in codes.items():
        lines += [f"# --- {', '.join(names)}", *fix.splitlines(), ""]
    return [*lines[:-1], "```"]


def _abstained(report: HealthReport) -> list[str]:
    if not report.abstained or report.steps <= 1:
        return []
    reasons: dict[str, list[str]] = {}
    for each in report.abstained:
        reasons.setdefault(each.reason, []).append(f"{each.code} {each.name}")
    lines = [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return ["### Checks that abstained", "", *lines]
