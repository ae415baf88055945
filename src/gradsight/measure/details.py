"""A closer look at a step, taken on some steps only: one table, whose columns add up over ranks.

A measurement that belongs here is a row of `PARTS`: how many numbers it has per parameter, and what
is told from their sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradsight.measure import histogram, update
from gradsight.measure.histogram import histograms, share_within_a_tenth
from gradsight.values.measured import Details, Floats


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement of a closer look."""

    width: int
    """How many numbers it has per parameter; they add up over ranks."""
    columns: Callable[[Floats], Mapping[str, Floats]]
    """What is told from the sums, by the name that checks and the record know it by."""


PARTS = (
    Part(histogram.WIDTH, histogram.detail_columns),
    Part(update.WIDTH, update.detail_columns),
)
WIDTH = sum(part.width for part in PARTS)


class DetailTable:
    """What this rank saw at a closer look, for all parameters of the model."""

    def __init__(self, size: int) -> None:
        self.sums: Floats = np.zeros((size, WIDTH))

    def add_histograms(self, rows: Sequence[int], counters: Floats) -> None:
        """The counters of these parameters' gradients."""
        self.sums[rows, : histogram.WIDTH] = counters

    def add_updates(self, rows: Sequence[int], sums: Floats) -> None:
        """What an optimizer did to these parameters; of several, the one that moved each most."""
        # One of them may hold parameters that its own loss does not reach, and so leave alone.
        known = self.sums[rows, histogram.WIDTH :]
        moved_more = known[:, update.SQUARED] > sums[:, update.SQUARED]
        self.sums[rows, histogram.WIDTH :] = np.where(moved_more[:, None], known, sums)


def details_in(
    sums: Floats,
    rows: Sequence[int],
    dead_shares: Mapping[int, float],
    step: int,
    recorded_as: Sequence[str] | None = None,
) -> Details:
    """What the sums of all ranks say of the parameters in `rows`; the others are not known.

    `recorded_as`: the names of all parameters, where histograms are to be recorded.
    """
    columns: dict[str, Floats] = {}
    start = 0
    for part in PARTS:
        for name, values in part.columns(sums[rows, start : start + part.width]).items():
            columns[name] = np.full(len(sums), np.nan)
            columns[name][rows] = values
        start += part.width
    columns["dead_share"] = np.full(len(sums), np.nan)
    for row, share in dead_shares.items():
        columns["dead_share"][row] = share
    if recorded_as is None:
        return Details(step, columns)
    counters = sums[rows, : histogram.WIDTH]
    return Details(
        step,
        columns,
        recorded=True,
        histograms=tuple(histograms(counters, [recorded_as[row] for row in rows], step)),
        share_within_a_tenth=share_within_a_tenth(counters),
    )
