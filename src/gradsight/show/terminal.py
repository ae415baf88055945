"""A health report on a terminal of 80 columns: verdict, findings, what to do. No torch."""

import textwrap
from collections.abc import Iterable

from gradsight.show.text import BOLD, GREEN, RED, WIDTH, YELLOW, tinted
from gradsight.values.causes import Group, groups
from gradsight.values.findings import Finding
from gradsight.values.health_report import SIGNS, HealthReport, headline
from gradsight.values.plain import listed
from gradsight.values.texts import cleaned, for_terminal, on_one_line
from gradsight.values.wording import diagnosis_lines

_MOST_NAMES = 4
_MOST_FINDINGS = 200
_COLOURS = {"healthy": GREEN, "warning": YELLOW, "critical": RED}


def health_lines(report: HealthReport, colour: bool = False, failed: bool = False) -> list[str]:
    """The report as lines of plain text, in which nothing steers a terminal.

    failed: whether the script failed, which is then not called healthy.
    """
    is_neutral = failed and not report.findings
    title = _title(headline(report, failed), report.status, colour and not is_neutral)
    notes = [line for note in report.notes for line in _wrapped(for_terminal(note))]
    return [title, f"   {report}", *notes, *findings_lines(report.findings, colour)]


def findings_lines(findings: Iterable[Finding], colour: bool = False) -> list[str]:
    """Findings as lines of plain text, each after an empty one."""
    lines = []
    found = list(findings)
    for group in groups([cleaned(each, for_terminal) for each in found[:_MOST_FINDINGS]]):
        finding = group.root
        lines.append("")
        heading = textwrap.wrap(_group_title(group), WIDTH, subsequent_indent="   ")
        lines += [_title(line, group.worst.severity, colour) for line in heading]
        lines += _wrapped(finding.message)
        lines += _seen(finding)
        lines += _wrapped(finding.recommendation, "do: ")
        lines += [f"      {line}".rstrip() for line in finding.fix.splitlines()]
        for consequence in group.consequences:
            sign = SIGNS[consequence.severity]
            title = f"   it follows: {sign} {_name_and_step(consequence)}"
            lines.append(_title(title, consequence.severity, colour))
            lines += [f"   {line}" for line in _seen(consequence)]
        lines += _wrapped(f"gradsight explain {on_one_line(finding.code)}", "more: ")
    if len(found) > _MOST_FINDINGS:
        lines += ["", f"{len(found) - _MOST_FINDINGS} more are in the record."]
    return lines


def _group_title(group: Group) -> str:
    """The root, with the sign of the most severe finding of its group."""
    worst = group.worst
    title = f"{SIGNS[worst.severity]} {_name_and_step(group.root)}"
    if worst is not group.root:
        title += f", leads to {on_one_line(worst.code)} ({worst.severity})"
    return title


def _name_and_step(finding: Finding) -> str:
    return on_one_line(f"{finding.code} {finding.name}, since step {finding.first_step}")


def _seen(finding: Finding) -> list[str]:
    """Evidence, places and cause."""
    lines = _wrapped(finding.evidence, "seen: ")
    if finding.parameters:
        lines += _wrapped(listed(finding.parameters, _MOST_NAMES), "where: ")
    return lines + _cause(finding)


def _cause(finding: Finding) -> list[str]:
    """The diagnosis, and where the incident is kept."""
    lines = []
    if finding.diagnosis is not None:
        label = "cause: "
        for line in diagnosis_lines(finding.diagnosis, WIDTH - 10):
            lines.append(f"   {label}{line}")
            label = " " * len(label)
    if finding.incident is not None:
        lines += _wrapped(finding.incident, "kept: ")
    return lines


def _wrapped(text: str, label: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"   {label}",
        subsequent_indent="   " + " " * len(label),
        break_on_hyphens=False,
        # A name that is longer than a line stays whole, so that it can be copied.
        break_long_words=False,
    )


def _title(text: str, status: str, colour: bool) -> str:
    return tinted(text, f"{BOLD};{_COLOURS[status]}", colour)
