"""gradsight report RUN_DIR"""

import sys
from pathlib import Path

from gradsight.cli.texts import Texts
from gradsight.core.files import write_text
from gradsight.errors import RunError
from gradsight.show.markdown import Summary, summarize
from gradsight.show.markdown import report as render
from gradsight.show.terminal import terminal_lines, wants_colour
from gradsight.store.reader import open_run


def report(run_dir: Path, /) -> int:
    """Write report.md into a run directory and print the verdict.

    Exits with 0 if all is fine, 1 with a warning, 2 if something critical was found.

    Parameters
    ----------
    run_dir
        A directory that `gradsight.watch(..., run_dir=...)` has written.
    """
    from gradsight.cli.check_result import gather, script_section

    first = summarize(open_run(run_dir))
    notes = ""
    checked = gather(run_dir)
    if checked.command:  # left by `gradsight check`
        notes = script_section(checked.notes())
    code = _tell(run_dir, first, notes)
    others = [place for place in sorted(run_dir.iterdir()) if (place / "run.sqlite").is_file()]
    return max([code, *(_tell(place, summarize(open_run(place)), "") for place in others)])


def _tell(place: Path, summary: Summary, notes: str) -> int:
    """Write one run's report, print its verdict and findings, give its exit code."""
    file = place / "report.md"
    write_report(file, render(summary, Texts(place)) + notes)
    if summary.health.findings:
        print("\n".join(terminal_lines(summary.health, wants_colour(sys.stdout))))
    else:
        print(summary.verdict)
    print(f"report: {file}")
    return summary.exit_code


def write_report(file: Path, text: str) -> None:
    """Write a report whole or not at all."""
    try:
        write_text(file, text)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error
