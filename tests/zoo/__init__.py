"""Small training runs with one planted fault each, and healthy ones, on public names only.

`faults.py` has the table of all cases and, as a script, prints how well they are judged.
"""

from collections.abc import Iterable
from typing import Any

Report = Any
"""The result of `Watch.report()`. Its class has no public name."""


def findings_of(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """Return the findings of several reports as dicts."""
    fields = ("code", "severity", "parameters", "first_step", "evidence")
    return [
        {field: getattr(finding, field) for field in fields}
        for report in reports
        for finding in report.findings
    ]
