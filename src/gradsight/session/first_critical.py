"""The one line that a watched run says at the terminal: that something critical was found."""

import os
import shlex
from collections.abc import Mapping, Sequence

from gradsight.core.notices import notice
from gradsight.values.findings import Finding
from gradsight.values.health_report import Abstention
from gradsight.values.measured import MeasuredStep
from gradsight.values.wording import short_cause

_NOT_KEPT = "Watch.report() has more; watch(..., run_dir=...) would keep it"


class FirstCritical:
    """Says the first critical finding of a run on standard error, and nothing after it.

    An output of the line like the record: findings come to it with their causes.
    """

    title = "the terminal"

    def __init__(self, run_dir: str | os.PathLike[str] | None) -> None:
        self._run_dir = run_dir
        self._said = False

    def write(self, measured: MeasuredStep, findings: Sequence[Finding]) -> None:
        """One step, and every finding that is new or has changed."""
        if findings:
            self._say_one_of(findings)

    def finish(self, findings: Sequence[Finding], abstained: Sequence[Abstention]) -> None:
        """The run is over: what ranks sent last may be critical too."""
        self._say_one_of(findings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars are not spoken of."""

    def log_scalar(self, step: int, name: str, value: float) -> None:
        """Scalars are not spoken of."""

    def log_tracked(self, step: int, name: str, value: float) -> None:
        """Scalars are not spoken of."""

    def _say_one_of(self, findings: Sequence[Finding]) -> None:
        critical = [finding for finding in findings if finding.severity == "critical"]
        if self._said or not critical:
            return
        self._said = True
        # Of several at once, one whose cause is known tells most.
        worst = min(critical, key=lambda finding: not _cause(finding))
        notice(f"{_fact(worst)}. {self._where_to_read_on(worst)}")

    def _where_to_read_on(self, finding: Finding) -> str:
        if self._run_dir is None:
            return _NOT_KEPT
        command = f"gradsight report {shlex.quote(os.fspath(self._run_dir))}"
        kept = ""
        if finding.incident is not None:
            kept = f" (kept: {os.path.join(os.fspath(self._run_dir), finding.incident)})"
        return f"Read on: {command}{kept}"


def _fact(finding: Finding) -> str:
    """The finding on one line, with its cause where that is known, else its evidence."""
    told = _cause(finding) or finding.evidence
    return f"step {finding.first_step}: {finding.code} {finding.name}: {told}"


def _cause(finding: Finding) -> str:
    return "" if finding.diagnosis is None else short_cause(finding.diagnosis)
