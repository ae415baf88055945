"""gradsight report RUN_DIR"""

import os
from pathlib import Path

from gradsight.errors import RunError
from gradsight.record.reader import open_run
from gradsight.show.markdown import report as render
from gradsight.show.markdown import summarize


def report(run_dir: Path, /) -> int:
    """Write report.md into a run directory and print the verdict.

    Exits with 0 if all is fine, 1 with a warning, 2 if something critical was found.

    Parameters
    ----------
    run_dir
        A directory that `gradsight.watch(..., run_dir=...)` has written.
    """
    summary = summarize(open_run(run_dir))
    file = run_dir / "report.md"
    write_report(file, render(summary))
    print(summary.verdict)
    print(f"report: {file}")
    return summary.exit_code


def write_report(file: Path, text: str) -> None:
    """Write a report whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error
