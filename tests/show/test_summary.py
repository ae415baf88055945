"""The verdict on a run: its severity is a field, the sentence and the exit code follow from it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gradsight.show.markdown import report_text
from gradsight.show.memory_and_dumps import dumps_line, memory_line
from gradsight.show.summary import summarize
from gradsight.store.stat_chunks import StatChunk, stat_chunks
from gradsight.store.tail_format import pack_statistics
from gradsight.values.diagnoses import Incident
from gradsight.values.dumps import DumpMetadata
from gradsight.values.findings import Finding, Problem
from gradsight.values.health_report import Abstention
from gradsight.values.histograms import Histogram
from gradsight.values.steps import ParameterStat, Scalar, Step

WARNING = Finding("GS302", "missing", "warning", (), 1, "seen", "missing", "look", "")
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
    watched: list[Scalar] = field(default_factory=list)

    def steps(self) -> Iterable[Step]:
        return self.made

    def stat_chunks(self) -> Iterable[StatChunk]:
        packed = [(each.step, [each.parameter], packed_statistics(each)) for each in self.stats]
        return stat_chunks(packed)

    def histograms(self, parameter: str | None = None) -> Iterable[Histogram]:
        return []

    def histogram_steps(self) -> list[int]:
        return []

    def histograms_at(self, steps: Iterable[int]) -> Iterable[Histogram]:
        return []

    def problems(self) -> Iterable[Problem]:
        return self.faults

    def findings(self) -> Iterable[Finding]:
        return self.judged

    def abstentions(self) -> Iterable[Abstention]:
        return []

    def incidents(self) -> Iterable[Incident]:
        return []

    def memory(self) -> Iterable[Scalar]:
        return self.watched

    def expert_looks(self) -> list[tuple[int, str, list[float]]]:
        return []

    def score_table(self) -> tuple[Any, list[str]] | None:
        return None


def packed_statistics(stat: ParameterStat) -> bytes:
    """One parameter's statistics as the record has them."""
    columns = {
        name: np.array([float(getattr(stat, name))]) for name in ("l2", "max_abs", "nan", "inf")
    }
    return pack_statistics(None, columns, wide=True)


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
    assert summary.blocks["a"].norms.tolist() == [1e200]
    assert "| `a` | 1.00e+200 |" in report_text(summary)


def test_the_curve_shows_the_spike_that_is_reported() -> None:
    made = [Step(step, 0.0, total_norm=130.0 if step == 70 else 0.5) for step in range(100)]
    text = report_text(summarize(Recorded(made, judged=[WARNING])))
    (row,) = [line for line in text.splitlines() if line.startswith("| Total gradient norm")]
    curve = row.split("`")[1]
    assert (curve.count("█"), curve.count("▁")) == (1, len(curve) - 1)
    made[30] = Step(30, 0.0, total_norm=math.nan)
    text = report_text(summarize(Recorded(made)))
    (row,) = [line for line in text.splitlines() if line.startswith("| Total gradient norm")]
    curve = row.split("`")[1]
    assert (curve.count("!"), curve.count("█")) == (1, 1)


def test_memory_and_dumps_are_in_the_report() -> None:
    watched = [
        Scalar(0, "checkpointing/baseline_gb", 0.2),
        Scalar(0, "checkpointing/optimized_gb", 0.12),
        Scalar(0, "checkpointing/reduction", 0.4),
        Scalar(0, "checkpointing/gradients_identical", 1.0),
        Scalar(0, "memory/predicted_peak_gb", 0.125),
        Scalar(0, "memory/rss_gb", 1.0),
        Scalar(5, "memory/rss_gb", 3.0),
        Scalar(9, "memory/rss_gb", 2.0),
    ]
    dumps = [dumped(step) for step in range(0, 40, 2)]
    dumps[3] = dumped(6, reason="GS201 gradient spike")
    text = report_text(summarize(Recorded(steps(), watched=watched), dumps))
    assert "| One step, predicted | 125 MB |" in text
    assert (
        "| One step, measured | 200 MB plain, 120 MB with activation checkpointing (40% saved, "
        "gradients bit for bit the same) |" in text
    )
    assert "| Monitored: process, resident | 1.00 GB → 2.00 GB, at most 3.00 GB (step 5) |" in text
    assert "| 6 | full | 5.00 MB | GS201 gradient spike | true |" in text
    assert "20 in all, 100 MB; 8 of the schedule's are not listed here." in text
    line = memory_line(watched)
    assert line == (
        "memory of one step: predicted 125 MB; measured 200 MB plain, 120 MB checkpointed"
    )
    assert dumps_line(dumps[2:4]) == "dumped: step 4, step 6 (GS201 gradient spike)"
    plain = report_text(summarize(Recorded(steps())))
    assert (memory_line([]), dumps_line([])) == (None, None)
    assert "## Memory" not in plain
    assert "## Dumped gradients" not in plain


def dumped(step: int, reason: str = "schedule") -> DumpMetadata:
    return DumpMetadata(step, "full", 1, "true", {}, (), 5_000_000, 0.0, reason)


def test_every_table_has_a_heading_and_a_header() -> None:
    lines = report_text(summarize(Recorded(steps()), [dumped(0)])).splitlines()
    for above, line in pairwise(lines):
        if line.startswith("| ---"):
            assert all(cell.strip() for cell in above.strip("|").split("|")), above
