"""A health report on a terminal of 80 columns: the verdict, each finding with evidence and layers,
what to do. No torch.
"""

import os
import textwrap
from typing import TextIO

from gradsight.values.findings import Finding
from gradsight.values.health_report import SIGNS, HealthReport, headline, shortened
from gradsight.values.wording import describe

_WIDTH = 79
_COLOURS = {"healthy": "32", "warning": "33", "critical": "31"}


def terminal_lines(report: HealthReport, colour: bool = False) -> list[str]:
    """The report as lines of plain text."""
    lines = [_tinted(headline(report), report.status, colour), f"   {report}"]
    for finding in report.findings:
        title = f"{SIGNS[finding.severity]} {finding.code} {finding.name}, since step {finding.first_step}"
        lines += ["", _tinted(title, finding.severity, colour)]
        lines += _wrapped(finding.message)
        lines += _wrapped(finding.evidence, "seen: ")
        if finding.parameters:
            lines += _wrapped(shortened(finding.parameters).replace("`", ""), "where: ")
        lines += _cause(finding)
        lines += _wrapped(finding.recommendation, "do: ")
        lines += [f"      {line}".rstrip() for line in finding.fix.splitlines()]
    return lines


def _cause(finding: Finding) -> list[str]:
    """The diagnosis, and where the incident is kept."""
    told = describe(finding.diagnosis, _WIDTH - 10) if finding.diagnosis is not None else []
    lines = [
        f"   {'cause: ' if number == 0 else '       '}{line}" for number, line in enumerate(told)
    ]
    return lines + _wrapped(finding.incident, "kept: ") if finding.incident is not None else lines


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR says otherwise."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _wrapped(text: str, label: str = "") -> list[str]:
    indent = "   " + " " * len(label)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"   {label}", subsequent_indent=indent, break_on_hyphens=False
    )


def _tinted(text: str, status: str, colour: bool) -> str:
    return f"\033[1;{_COLOURS[status]}m{text}\033[0m" if colour else text
