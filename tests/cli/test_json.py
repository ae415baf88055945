"""What programs read: every `--json` prints one strict object, with a number of its schema."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradsight.cli import main
from gradsight.values.findings import Finding
from gradsight.values.plain import plain
from hostile import hostile_run

FIELDS = plain(Finding("GS103", "n", "critical", (), 0, "e", "m", "r", "f")).keys()


def refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def printed(capfd: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) in (0, 1, 2)
    return json.loads(capfd.readouterr().out, parse_constant=refuse)


def findings_in(value: Any) -> Iterator[dict[str, Any]]:
    """Whatever has a code and a severity, wherever it stands."""
    if isinstance(value, dict):
        if {"code", "severity"} <= value.keys():
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from findings_in(each)


def test_every_answer_has_its_schema_and_findings_have_the_same_fields(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = hostile_run(tmp_path / "run", "a name")
    incident = next((run / "incidents").iterdir())
    answers = {
        "report": printed(capfd, "report", run),
        "findings": printed(capfd, "findings", run),
        "influence": printed(capfd, "influence", run),
        "compare": printed(capfd, "compare", run, run),
        "replay": printed(capfd, "replay", incident),
        "verify": printed(capfd, "verify", run),
    }
    assert {name: answer["schema"] for name, answer in answers.items()} == dict.fromkeys(answers, 1)
    for name in ("report", "findings"):
        found = list(findings_in(answers[name]))
        assert found, name
        assert all(each.keys() >= FIELDS for each in found), name
