"""gradsight report RUN_DIR"""

import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gradsight.cli.check_result import read_result, runs_inside
from gradsight.core import rundir
from gradsight.dump.reader import dumps_in
from gradsight.errors import UsageError
from gradsight.show.memory_and_dumps import dumps_line, memory_line
from gradsight.show.run_report import write_reports
from gradsight.show.summary import Summary, summarize
from gradsight.show.terminal import health_lines
from gradsight.show.text import json_text, wants_colour
from gradsight.store.reader import open_run
from gradsight.train.sample_texts import SampleTexts
from gradsight.values.health_report import SEVERITIES, SIGNS
from gradsight.values.plain import plain
from gradsight.values.texts import for_terminal


def report(
    run_dir: Path,
    /,
    *,
    data: Path | None = None,
    tokenizer: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    open_page: Annotated[bool, Parameter(name="--open", negative="")] = False,
) -> int:
    """Write report.md and report.html into a run directory and print the verdict.

    Exits with 0 if all is fine, 1 with a warning, 2 if something critical was found or the record
    is damaged, 64 for wrong usage, such as a missing folder or a folder of several runs.

    Parameters
    ----------
    run_dir
        A directory that `gradsight.watch(..., run_dir=...)` has written.
    data
        Where the samples' text is: what `gradsight train --data` was given. No path that the run
        itself names is opened.
    tokenizer
        A tokenizer.json, by which the tokens of a .bin are shown as text.
    as_json
        Print one JSON object instead: status, verdict, findings.
    open_page
        Open the page in a browser.
    """
    if data is not None and not data.exists():
        raise UsageError(f"--data {data}: there is no such file or folder")
    texts = SampleTexts(run_dir, data, tokenizer)
    summaries = {run_dir: _report_one(run_dir, texts, None)}
    for place in runs_inside(run_dir):
        summaries[place] = _report_one(place, SampleTexts(place, data, tokenizer), [])
    if as_json:
        print(json_text(_as_object(summaries)))
    else:
        for place, summary in summaries.items():
            print("\n".join(_lines(place, summary)))
        if texts.why_not is not None:
            print(for_terminal(texts.why_not))
    if open_page:
        webbrowser.open((run_dir / rundir.PAGE).resolve().as_uri())
    return max(summary.exit_code for summary in summaries.values())


def _report_one(run_dir: Path, texts: SampleTexts, notes: Sequence[str] | None) -> Summary:
    """Write one run's report; without notes, with those that `gradsight check` has left."""
    run = open_run(run_dir)
    summary = summarize(run, dumps_in(run_dir))
    if notes is None:
        notes = []
        # Only where there is something to read: all runs of the folder are summed up for it.
        if (run_dir / rundir.CHECK).exists():
            checked = read_result(run_dir)
            if checked.command:
                notes = checked.notes()
                summary = replace(summary, failure=checked.failure)
    write_reports(run, summary, texts, notes)
    return summary


def _lines(run_dir: Path, summary: Summary) -> list[str]:
    """The verdict and the findings of one run, for a terminal."""
    lines = [for_terminal(each) for each in (summary.verdict, *summary.health.notes)]
    if summary.health.findings:
        lines = health_lines(summary.health, wants_colour(sys.stdout))
    if summary.failure is not None:
        lines.insert(0, for_terminal(f"{SIGNS['critical']} {summary.failure}"))
    others = [memory_line(summary.memory), dumps_line(summary.dumps)]
    others += [f"report: {run_dir / rundir.REPORT}", f"page:   {run_dir / rundir.PAGE}"]
    return lines + [for_terminal(line) for line in others if line is not None]


def _as_object(summaries: Mapping[Path, Summary]) -> dict[str, Any]:
    """What the report says, for programs; the worst of several runs speaks for them all."""
    runs = [
        {
            "run": str(place),
            "status": summary.severity,
            "verdict": summary.sentence,
            "steps": len(summary.steps),
            "findings": plain(summary.health.findings),
        }
        for place, summary in summaries.items()
    ]
    worst = max(runs, key=lambda each: SEVERITIES.index(each["status"]))
    findings = [finding for each in runs for finding in each["findings"]]
    first = next(iter(summaries))
    answer = {**worst, "findings": findings, "page": str(first / rundir.PAGE)}
    if len(runs) > 1:
        answer["runs"] = runs
    return answer
