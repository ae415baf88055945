"""gradsight report RUN_DIR"""

import sys
from pathlib import Path

from gradsight.cli.check_result import read_result, script_section
from gradsight.core import rundir
from gradsight.dump.reader import dumps_in
from gradsight.show.markdown import report_text
from gradsight.show.memory_and_dumps import dumps_line, memory_line
from gradsight.show.norm_chart import norm_chart
from gradsight.show.summary import Summary, summarize
from gradsight.show.terminal import health_lines
from gradsight.show.text import wants_colour
from gradsight.store.reader import open_run
from gradsight.store.run_files import write_run_report
from gradsight.train.sample_texts import SampleTexts


def report(run_dir: Path, /) -> int:
    """Write report.md and norms.svg into a run directory and print the verdict.

    Exits with 0 if all is fine, 1 with a warning, 2 if something critical was found or the record
    is damaged, 64 for wrong usage, a missing folder among it.

    Parameters
    ----------
    run_dir
        A directory that `gradsight.watch(..., run_dir=...)` has written.
    """
    first = summarize(open_run(run_dir), dumps_in(run_dir))
    notes = ""
    checked = read_result(run_dir)
    if checked.command:  # left by `gradsight check`
        notes = script_section(checked.notes())
    code = _report_one(run_dir, first, notes)
    for place in sorted(run_dir.iterdir()):
        if rundir.is_run(place):
            code = max(code, _report_one(place, summarize(open_run(place), dumps_in(place)), ""))
    return code


def _report_one(run_dir: Path, summary: Summary, notes: str) -> int:
    """Write one run's report, print its verdict and findings, give its exit code."""
    text = report_text(summary, SampleTexts(run_dir)) + notes
    write_run_report(run_dir, text, norm_chart(summary))
    if summary.health.findings:
        print("\n".join(health_lines(summary.health, wants_colour(sys.stdout))))
    else:
        print(summary.verdict)
    for line in (memory_line(summary.memory), dumps_line(summary.dumps)):
        if line is not None:
            print(line)
    print(f"report: {run_dir / rundir.REPORT}")
    return summary.exit_code
