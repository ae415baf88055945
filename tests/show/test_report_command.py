"""gradsight report: both files, one JSON object, the page in a browser, exit codes as ever."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

import warm
from gradsight.cli import main
from show.page.runs import finding, plain_norms, record


def test_both_files_and_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run", plain_norms(20, 14), findings=[finding("GS201", 5)])
    assert main(["report", str(run.path)]) == 1
    out = capsys.readouterr().out
    assert "gradient spike" in out
    assert str(run.path / "report.html") in out
    assert max(map(len, out.replace(str(run.path), "run").splitlines())) <= 80
    assert (run.path / "report.md").read_text().startswith("# Gradsight report")
    page = (run.path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<title>1 warning - run</title>" in page


def test_a_folder_of_runs_leads_to_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        record(tmp_path / "runs" / name, plain_norms(20, 14))
    assert main(["report", str(tmp_path / "runs")]) == 64
    error = capsys.readouterr().err
    assert "is a folder of 2 runs, not a run directory" in error
    assert f"such as {tmp_path / 'runs' / 'first'}" in error
    assert f"gradsight serve {tmp_path / 'runs'}" in error


def test_a_failed_script_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run", plain_norms(20, 14))
    script = {"command": ["python", "a.py"], "exit_code": 1, "error": "ValueError: no rows"}
    (run.path / "check.json").write_text(json.dumps({"script": script}))
    assert main(["report", str(run.path)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("failed with exit code 1 after 20 optimizer steps: ValueError: no rows")
    assert second == "No finding in 20 steps before the failure"


@pytest.mark.parametrize(("severity", "code"), [(None, 0), ("warning", 1), ("critical", 2)])
def test_json_is_one_strict_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], severity: str | None, code: int
) -> None:
    findings = [] if severity is None else [finding("GS103", 5, severity)]
    run = record(tmp_path / "run", plain_norms(20, 14), findings=findings)
    assert main(["report", str(run.path), "--json"]) == code
    out = capsys.readouterr().out
    told = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert told["status"] == (severity or "healthy")
    assert told["schema"] == 1
    if severity is None:
        assert told["verdict"] == "Healthy: no finding in 20 steps"
        assert told["findings"] == []
    else:
        assert told["verdict"] == "Gradient spike, first at step 5"
        (found,) = told["findings"]
        assert (found["code"], found["first_step"]) == ("GS103", 5)
        assert {"name", "parameters", "evidence", "message", "recommendation", "fix"} <= set(found)
    assert (run.path / "report.html").exists()


def test_what_is_not_finite_is_text_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    norms = plain_norms(20, 14)
    norms[10:] = np.nan
    run = record(tmp_path / "run", norms, losses=norms[:, 0])
    assert main(["report", str(run.path), "--json"]) == 2
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["status"] == "critical"
    assert "NaN or Inf in the gradient of 10 steps" in told["verdict"]
    assert "<title>critical - run</title>" in (run.path / "report.html").read_text()


def test_several_models_speak_by_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run", plain_norms(20, 14))
    record(
        tmp_path / "run" / "critic", plain_norms(20, 14), findings=[finding("GS103", 5, "critical")]
    )
    assert main(["report", str(tmp_path / "run"), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "critical"
    assert [each["status"] for each in told["runs"]] == ["healthy", "critical"]
    assert len(told["findings"]) == 1
    assert (tmp_path / "run" / "critic" / "report.html").exists()


def test_open_shows_the_page(tmp_path: Path) -> None:
    run = record(tmp_path / "run", plain_norms(5, 14))
    opener = tmp_path / "opener"
    opener.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    opener.chmod(opener.stat().st_mode | stat.S_IXUSR)
    # Python's own way to name a browser.
    done = warm.run(
        ["-m", "gradsight", "report", run.path, "--open"],
        env={**os.environ, "BROWSER": str(opener)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "opened").read_text().strip() == (run.path / "report.html").as_uri()
