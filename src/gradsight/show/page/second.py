"""A second run laid over the first: its lines, and a map of the differences. No torch."""

from typing import Any

import numpy as np

from gradsight.show.comparison import aligned_chunks
from gradsight.show.page.encode import encoded_level
from gradsight.show.page.heat import MOST_COLUMNS, fine_rows
from gradsight.show.page.heights import HeatRows, Heights
from gradsight.show.page.payload import ShownRun, second_words, shown_rows
from gradsight.show.page.pyramid import Grid, coarsened, grid_factor, joined, reduce_steps
from gradsight.show.page.series import run_lines
from gradsight.show.summary import Summary

PER_OCTAVE = 8.0
"""Differences are told in eighths of an octave: beyond 6 of them a single step is shown."""
_ONE_IS_ZERO = 10.0
"""Octaves that stand for the difference between a number and zero."""


def with_second(
    payload: dict[str, Any], runs: tuple[ShownRun, ShownRun], summaries: tuple[Summary, Summary]
) -> dict[str, Any]:
    """The payload of the first of two runs with the second one over it."""
    first, second = runs
    other = summaries[1]
    rows = shown_rows(first, summaries[0])
    maps = dict(payload["heat"]["maps"])
    level = difference_level(rows, first, second)
    if level is not None:
        maps["difference"] = [level]
    over = {**second_words(second, other), "lines": run_lines(other.steps)}
    return {**payload, "heat": {**payload["heat"], "maps": maps}, "second": over}


def difference_level(rows: HeatRows, first: ShownRun, second: ShownRun) -> dict[str, Any] | None:
    """The second run's norms over the common steps, and how far they are from the first one's."""
    parts = []
    for one, other in aligned_chunks(iter(first.stat_chunks()), iter(second.stat_chunks())):
        mine = rows.heights(one)
        theirs = rows.heights(other)
        apart = octaves_apart(mine, theirs) * PER_OCTAVE
        parts.append(reduce_steps(one.steps, theirs, apart, np.arange(len(one.steps))))
    if not parts:
        return None
    columns = joined(parts)
    factor = grid_factor(len(columns), MOST_COLUMNS)
    columns = coarsened(columns, Grid(factor))
    return {**encoded_level(columns, fine_rows(columns, rows)), "factor": factor}


def octaves_apart(mine: Heights, theirs: Heights) -> Heights:
    """How many octaves the second norm is above the first; NaN where one of them is no number.

    >>> from gradsight.show.page.heights import heights_of
    >>> one, other = heights_of(np.array([[8.0, 0.0, 2.0, -1.0], [16.0, 0.0, 0.0, 4.0]]))
    >>> octaves_apart(one, other).tolist()
    [1.0, 0.0, -10.0, nan]
    """
    with np.errstate(invalid="ignore"):
        apart = np.clip(theirs - mine, -_ONE_IS_ZERO, _ONE_IS_ZERO)
    apart[~(np.isfinite(mine) & np.isfinite(theirs))] = np.nan
    result: Heights = apart.astype(np.float32)
    return result
