"""What follows from another finding stands under it, and two faults stay two."""

import dataclasses

import pytest

from gradsight.values.causes import FOLLOWS_FROM, groups, roots_of, with_causes
from gradsight.values.diagnoses import Diagnosis, GuiltyOperation
from gradsight.values.findings import Finding
from gradsight.values.health_report import ParameterCounts, headline, make_report


def found(code: str, first_step: int = 0, parameters: tuple[str, ...] = ("w",)) -> Finding:
    severity = "critical" if code in ("GS103", "GS106") else "warning"
    return Finding(code, f"name of {code}", severity, parameters, first_step, "seen", "m", "r", "f")


def causes(*findings: Finding) -> dict[str, str | None]:
    return {each.code: each.caused_by for each in with_causes(findings)}


def test_there_is_no_way_around_in_a_circle() -> None:
    """But for what is not finite, where the earlier one is the cause."""
    ways = {code: set(causes) for code, causes in FOLLOWS_FROM.items()}
    ways["GS103"].discard("GS104")
    while ways:
        ends = [code for code, onwards in ways.items() if not onwards & ways.keys()]
        assert ends, ways
        for code in ends:
            del ways[code]


@pytest.mark.parametrize(
    ("root", "others"),
    [
        ("GS403", ("GS105", "GS106", "GS107", "GS203", "GS402")),
        ("GS204", ("GS105", "GS107", "GS205", "GS402")),
        ("GS205", ("GS107", "GS301", "GS607")),
        ("GS302", ("GS205", "GS301")),
        ("GS401", ("GS103", "GS107", "GS201", "GS206")),
        ("GS305", ("GS101", "GS202", "GS401", "GS405")),
        ("GS606", ("GS103", "GS106")),
    ],
)
def test_one_cause_is_one_finding(root: str, others: tuple[str, ...]) -> None:
    findings = [found(root), *(found(other, first_step=5) for other in others)]
    told = causes(*findings)
    assert told.pop(root) is None
    assert set(told.values()) == {root}
    report = make_report(9, 1.0, ParameterCounts(0, 0, 0, 1), findings, steps=10)
    assert report.findings[0].code == root
    assert len(report.findings) == len(findings)
    assert f"1 finding ({len(others)} more follow from it)" in headline(report)


@pytest.mark.parametrize(
    "pair",
    [
        (found("GS302"), found("GS502")),
        (found("GS502"), found("GS305")),
        (found("GS301", parameters=("a",)), found("GS205", parameters=("b",))),
        (found("GS302", parameters=("a.weight",)), found("GS205", parameters=("b.weight",))),
        (found("GS607", parameters=()), found("GS205")),
        (found("GS201", first_step=20), found("GS103", first_step=60)),
        (found("GS103", first_step=3), found("GS401", first_step=20)),
        (found("GS302"), found("GS401")),
    ],
    ids=lambda pair: f"{pair[0].code} {pair[1].code}",
)
def test_two_faults_stay_two(pair: tuple[Finding, Finding]) -> None:
    assert set(causes(*pair).values()) == {None}


def test_the_earlier_of_a_nan_and_an_infinity_is_the_cause() -> None:
    assert causes(found("GS103", 4), found("GS104", 3)) == {"GS103": "GS104", "GS104": None}
    assert causes(found("GS103", 3), found("GS104", 4)) == {"GS103": None, "GS104": "GS103"}
    assert causes(found("GS103", 3), found("GS104", 3)) == {"GS103": None, "GS104": "GS103"}


def test_a_nan_of_the_data_has_no_other_cause() -> None:
    guilty = GuiltyOperation("input", "before", None, None, None, (), 0)
    nan = dataclasses.replace(found("GS103", 9), diagnosis=Diagnosis(guilty, (), 0.1))
    assert causes(found("GS401"), nan)["GS103"] is None
    assert causes(found("GS401"), found("GS103", 9))["GS103"] == "GS401"


def test_what_is_not_in_the_report_causes_nothing() -> None:
    """Also where a record, which a stranger may have written, says otherwise."""
    foreign = dataclasses.replace(found("GS103"), caused_by="GS999")
    assert causes(foreign) == {"GS103": None}
    assert [group.root for group in groups([foreign])] == [foreign]
    alone = dataclasses.replace(found("GS205"), caused_by="GS205")
    assert roots_of([alone]) == [alone]


def test_the_report_shows_what_follows_under_its_cause() -> None:
    findings = [found("GS107"), found("GS403"), found("GS502")]
    report = make_report(9, 1.0, ParameterCounts(0, 0, 0, 1), findings, steps=10)
    assert [each.code for each in report.findings] == ["GS403", "GS107", "GS502"]
    text = report.to_markdown()
    assert "1. ⚠️ **GS403" in text
    assert "    - It follows: ⚠️ **GS107" in text
    assert "2. ⚠️ **GS502" in text
    assert "`gradsight explain GS403`" in text
    assert "GS107: r" not in text  # what mends the cause mends it too
    assert report.to_dict()["findings"][1]["caused_by"] == "GS403"
