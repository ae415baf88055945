"""gradsight compare RUN_A RUN_B"""

import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gradsight.errors import DIFFERENT
from gradsight.show.comparison import RunComparison, compare_runs
from gradsight.show.comparison_text import comparison_lines
from gradsight.show.text import json_text, wants_colour
from gradsight.store.reader import open_run


def compare(
    run_a: Path,
    run_b: Path,
    /,
    *,
    exact: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Compare two runs: the first step and parameter where they differ, and what else does.

    The steps that both have are compared: norm and largest entry of every gradient, loss, learning
    rate, total norm, clipping, loss scale. NaN is the same as NaN. Numbers that only one run has
    recorded, and findings, settings and versions that differ, are listed, but do not make two runs
    different.

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
    """
    runs = (open_run(run_a), open_run(run_b))
    comparison = compare_runs(*runs, exact)
    if as_json:
        print(_as_json(comparison))
    else:
        lines = comparison_lines(comparison, str(run_a), str(run_b), wants_colour(sys.stdout))
        print("\n".join(lines))
    return 0 if comparison.same else DIFFERENT


def _as_json(comparison: RunComparison) -> str:
    """One object of strict JSON."""
    first = comparison.first
    values: dict[str, Any] = {
        "same": comparison.same,
        "first": None if first is None else asdict(first),
        **{field.name: getattr(comparison, field.name) for field in fields(comparison)},
    }
    return json_text(values)
