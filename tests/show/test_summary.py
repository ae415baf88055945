"""The verdict on a run: its severity is a field, the sentence and the exit code follow from it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gradsight.show.markdown import report_text
from gradsight.show.summary import summarize
from gradsight.values.diagnoses import Incident
from gradsight.values.findings import Finding, Problem
from gradsight.values.health_report import Abstention
from gradsight.values.histograms import Histogram
from gradsight.values.steps import ParameterStat, Step

WARNING = Finding("GS201", "spike", "warning", (), 1, "seen", "a spike", "look", "")
CRITICAL = Finding("GS103", "nan", "critical", (), 1, "seen", "NaN", "look", "")
BROKEN = ParameterStat(1, "weight", math.nan, math.nan, nan=1)


@dataclass
class Recorded:
    """A run as the store gives it."""

    made: list[Step] = field(default_factory=list)
    stats: list[ParameterStat] = field(default_factory=list)
    judged: list[Finding] = field(default_factory=list)
    faults: list[Problem] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> Iterable[Step]:
        return self.made

    def parameter_stats(self) -> Iterable[ParameterStat]:
        return self.stats

    def histograms(self, parameter: str | None = None) -> Iterable[Histogram]:
        return []

    def problems(self) -> Iterable[Problem]:
        return self.faults

    def findings(self) -> Iterable[Finding]:
        return self.judged

    def abstentions(self) -> Iterable[Abstention]:
        return []

    def incidents(self) -> Iterable[Incident]:
        return []

    def score_table(self) -> tuple[Any, list[str]] | None:
        return None


def steps(skipped: bool = False) -> list[Step]:
    return [Step(0, 0.0, total_norm=1.0), Step(1, 1.0, total_norm=2.0, skipped=skipped)]


@pytest.mark.parametrize(
    ("run", "severity", "verdict"),
    [
        (Recorded(), "warning", "⚠️ no steps: no optimizer step was seen"),
        (Recorded(steps()), "healthy", "✅ healthy: no finding in 2 steps"),
        (
            Recorded(steps(), config={"settings": {"watch": {"health": False}}}),
            "healthy",
            "✅ 2 steps, not judged: health=False",
        ),
        (Recorded(steps(), judged=[WARNING]), "warning", "⚠️ warning: 1 finding in 2 steps"),
        (
            Recorded(steps(), judged=[WARNING, CRITICAL]),
            "critical",
            "❌ critical: 2 findings in 2 steps",
        ),
        (
            Recorded(steps(), [BROKEN]),
            "critical",
            "❌ NaN or Inf in the gradient of 1 step, first at step 1 in weight",
        ),
        (
            Recorded(steps(skipped=True), [BROKEN]),
            "healthy",
            "✅ healthy: no finding in 2 steps",
        ),
    ],
)
def test_severity_verdict_and_exit_code(run: Recorded, severity: str, verdict: str) -> None:
    summary = summarize(run)
    assert summary.severity == severity
    assert summary.verdict == verdict
    assert summary.exit_code == ["healthy", "warning", "critical"].index(severity)


def test_the_worst_finding_comes_first() -> None:
    summary = summarize(Recorded(steps(), judged=[WARNING, CRITICAL]))
    assert summary.health.findings == (CRITICAL, WARNING)


def test_a_norm_whose_square_no_number_holds() -> None:
    """A gradient of float64 can be that large; the report must still be written."""
    summary = summarize(Recorded(steps(), [ParameterStat(0, "a.weight", 1e200, 1e200)]))
    assert summary.blocks["a"].norms == [math.inf]
    assert "| `a` | Inf |" in report_text(summary)
