"""The family of a finding is a field; only what was written before is told by its code."""

import dataclasses
import re
from pathlib import Path

import pytest

import gradsight
from gradsight.health.registry import CHECKS
from gradsight.store.store import open_store
from gradsight.values.findings import FIRST_STEP, ONE_LOOK, OTHER, TREND, Finding, family_of
from gradsight.values.health_report import ParameterCounts, make_report

FINDING = Finding("GS103", "NaN", "critical", ("weight",), 3, "seen", "bad", "do this", "fix()")


def test_a_finding_knows_its_family() -> None:
    assert FINDING.family == ONE_LOOK
    assert dataclasses.replace(FINDING, code="MINE", family=TREND).family == TREND
    assert Finding("MINE1", "mine", "warning", (), 0, "", "", "", "").family == OTHER


def test_every_check_has_a_family() -> None:
    import gradsight.health.judge  # files the checks

    assert gradsight.health.judge
    assert OTHER not in {check.family for check in CHECKS.values()}
    assert family_of("GS601") == FIRST_STEP


def test_the_record_keeps_the_family(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    mine = dataclasses.replace(FINDING, code="MINE", family=TREND)
    store.add_finding(mine)
    store.close()
    assert list(gradsight.open_run(tmp_path).findings()) == [mine]


def test_a_record_without_families_is_read(tmp_path: Path) -> None:
    """As they were written before there were any."""
    value = dataclasses.asdict(FINDING)
    del value["family"]
    store = open_store(tmp_path)
    store.add_record("finding", "GS103:3", 3, value)
    store.close()
    assert list(gradsight.open_run(tmp_path).findings()) == [FINDING]


def test_the_report_goes_by_family() -> None:
    trend = dataclasses.replace(
        FINDING, code="MINE", name="drift", severity="warning", family=TREND
    )
    report = make_report(9, 1.0, ParameterCounts(0, 0, 0, 2), [trend], steps=10)
    assert "| Trend | drift | ⚠️ |" in report.to_markdown()


@pytest.mark.internal
def test_nobody_else_reads_the_number_of_a_code() -> None:
    pattern = re.compile(r"\bcode\[\d|code\.startswith\(\"GS")
    package = Path(gradsight.__file__).parent
    reading = {path for path in package.rglob("*.py") if pattern.search(path.read_text())}
    assert not reading
    assert pattern.search('finding.code[2] in "345"')


@pytest.mark.parametrize("severity", ["healthy", "warning", "critical"])
def test_the_status_is_that_of_the_worst_finding(severity: str) -> None:
    given = [dataclasses.replace(FINDING, severity=severity)] if severity != "healthy" else []
    assert make_report(0, 1.0, ParameterCounts(0, 0, 0, 1), given).status == severity
