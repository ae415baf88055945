"""A health report on a terminal of 80 columns: the verdict, each finding with evidence and layers, what to do. No torch."""

import os
import textwrap
from typing import TextIO

from gradsight.verdict import SIGNS, HealthReport, headline, shortened

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
        lines += _wrapped(finding.recommendation, "do: ")
        lines += [f"      {line}".rstrip() for line in finding.fix.splitlines()]
    return lines


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR says otherwise."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _wrapped(text: str, label: str = "") -> list[str]:
    indent = "   " + " " * len(label)
    return textwrap.wrap(text, _WIDTH, initial_indent=f"   {label}", subsequent_indent=indent, break_on_hyphens=False)


def _tinted(text: str, status: str, colour: bool) -> str:
    return f"\033[1;{_COLOURS[status]}m{text}\033[0m" if colour else text
