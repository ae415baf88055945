"""gradsight compare RUN_A RUN_B"""

import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gradsight.dump.reader import dumps_in
from gradsight.errors import DIFFERENT, WrongPlace
from gradsight.show.comparison import RunComparison, compare_runs
from gradsight.show.comparison_text import comparison_lines
from gradsight.show.page.assemble import page
from gradsight.show.page.payload import WholeRun, run_payload
from gradsight.show.page.second import with_second
from gradsight.show.summary import summarize
from gradsight.show.text import json_text, wants_colour
from gradsight.store.reader import open_run
from gradsight.store.run_files import write_report
from gradsight.values.texts import for_terminal

_PAGE = Path("compare.html")


def compare(
    run_a: Path,
    run_b: Path,
    /,
    *,
    exact: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    output: Path | None = None,
) -> int:
    """Compare two runs: the first step and parameter where they differ, and what else does.

    The steps that both have are compared: norm and largest entry of every gradient, loss, learning
    rate, total norm, clipping, loss scale. NaN is the same as NaN. Findings, settings and versions
    that differ are listed, but do not make two runs different. A page with both runs is written.

    Exits with 0 if the runs are the same, 1 if they differ, 2 if a run is damaged, and 64 for wrong
    usage, including a missing run. `gradsight dump diff`, which compares gradients entry by entry,
    has the same exit codes.

    Parameters
    ----------
    exact
        Ask for identical numbers. Otherwise they may differ by a relative 1e-4, which is what
        rounding in another order does, and by 1e-8 of the step's largest.
    as_json
        Print one JSON object instead: `same`, `first` (null, or step, parameter, what, a, b), and
        everything else that is compared.
    output
        Where the page goes; by default compare.html in the working directory, unless that is
        inside one of the runs.
    """
    runs = (open_run(run_a), open_run(run_b))
    comparison = compare_runs(*runs, exact)
    written, trouble = _write_page(runs, output)
    if as_json:
        print(_as_json(comparison, written))
    else:
        lines = comparison_lines(comparison, str(run_a), str(run_b), wants_colour(sys.stdout))
        print("\n".join(lines))
        if written is not None:
            print(for_terminal(f"\npage: {written}"))
    if trouble is not None:
        print(for_terminal(f"gradsight: no page: {trouble}"), file=sys.stderr)
    return 0 if comparison.same else DIFFERENT


def _write_page(
    runs: tuple[WholeRun, WholeRun], output: Path | None
) -> tuple[Path | None, str | None]:
    """Write the page with both runs; where nobody asked for a place, it is no fault to have none.

    The place, or what was in the way.
    """
    here = Path.cwd()
    if output is None and any(here.is_relative_to(run.path.resolve()) for run in runs):
        return None, "it would be written into a run; --output FILE says where to"
    place = output or _PAGE
    first, second = (summarize(run, dumps_in(run.path)) for run in runs)
    payload = with_second(run_payload(runs[0], first), runs, (first, second))
    try:
        write_report(place, page(payload))
    except WrongPlace as error:
        if output is not None:
            raise
        return None, str(error)
    return place, None


def _as_json(comparison: RunComparison, written: Path | None) -> str:
    """One object of strict JSON."""
    first = comparison.first
    values: dict[str, Any] = {
        "same": comparison.same,
        "first": None if first is None else asdict(first),
        **{field.name: getattr(comparison, field.name) for field in fields(comparison)},
        "page": None if written is None else str(written),
    }
    return json_text(values)
