"""gradsight findings RUN_DIR"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gradsight.errors import UsageError
from gradsight.show.terminal import findings_lines
from gradsight.show.text import json_text, wants_colour
from gradsight.store.reader import open_run
from gradsight.values.findings import Finding
from gradsight.values.health_report import SEVERITIES, ordered, worst
from gradsight.values.plain import plain


def findings(
    run_dir: Path,
    /,
    *,
    since: Annotated[int, Parameter(name="--since")] = 0,
    json: bool = False,
) -> int:
    """Print what was found in a run so far; for scripts that poll it while it trains.

    Exits with 0 if nothing is printed, 1 for warnings, 2 if something of it is critical or the
    record is damaged, 64 if there is no run.

    Parameters
    ----------
    run_dir
        A directory that `gradsight.watch(..., run_dir=...)` writes, or has written.
    since
        Only what was found at this step or later. A trend that began at step 40 and was recognised
        at step 90 was found at 90.
    json
        Print one JSON object: status, step (the last recorded one, or null), findings.
    """
    if since < 0:
        raise UsageError(f"--since must be 0 or more, got {since}")
    run = open_run(run_dir)
    # Ordered again: what a finding follows from has to be among those that are printed.
    found = ordered([each for each in run.findings() if each.made_step >= since])
    last = run.next_step() - 1
    status = worst(finding.severity for finding in found)
    if json:
        body = {
            "status": status,
            "step": None if last < 0 else last,
            "findings": [plain(finding) for finding in found],
        }
        print(json_text(body))
    else:
        _show(found, since, last)
    return SEVERITIES.index(status)


def _show(found: list[Finding], since: int, last: int) -> None:
    if last < 0:
        print("No step is recorded yet.")
        return
    lines = findings_lines(found, wants_colour(sys.stdout))
    print("\n".join(lines) if lines else f"Nothing was found from step {since} to step {last}.")
