"""The heat map of a run as the page takes it: rows, levels of columns, further maps. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradsight.show.page.encode import encoded_level, encoded_size
from gradsight.show.page.heights import ABSENT, HeatRows, Heights, heights_of
from gradsight.show.page.pyramid import (
    LEVEL_FACTOR,
    Columns,
    Grid,
    coarsened,
    grid_factor,
    joined,
    reduce_steps,
    zones_around,
)
from gradsight.show.page.usual import Usual, total_logarithms
from gradsight.store.stat_chunks import StatChunk
from gradsight.values.steps import Step

MOST_COLUMNS = 2048
"""Columns of the coarsest level, apart from single steps around findings: about a screen's."""
_EXACT_CELLS = 200_000
"""Up to here every step and three digits of every norm are in the page."""
_FINE_CELLS = 300_000
"""Cells of a level that get a second byte in any case."""
_FIRST_LEVEL_CELLS = 5_000_000
_FINEST_CELLS = 3_000_000
_FINEST_COLUMNS = 16_384
_ROOM = 2_300_000
"""Characters of all finer levels together."""
_MOST_TEXT = 5_300_000
"""Characters of all levels."""
_ZONE_COLUMNS = 1024
"""Single steps around findings, all together."""
_WIDEST_ZONE = 128
_NARROWEST_ZONE = 8
DETAIL_MAPS = {"update": "update_ratio", "weight": "weight_rms", "change": "update_rms"}
"""Maps of what is measured on some steps only, and the columns that they show."""
_MAP_CELLS = 40_000
"""Cells of a map of what is measured on some steps only."""


class MeasuredRun(Protocol):
    """What the heat map needs of a run."""

    def stat_chunks(self) -> Iterable[StatChunk]: ...
    def measured_steps(self) -> list[int]: ...
    def measured_parameters(self) -> list[str]: ...


@dataclass(frozen=True)
class HeatMap:
    """Norms of every row over the steps, and what else was measured of the rows."""

    rows: HeatRows
    finest: Columns
    grid: Grid
    """That of the finest columns."""
    details: Mapping[str, Columns] = field(default_factory=dict)
    """What was measured on some steps only, by the name of its map."""


def heat_map(
    run: MeasuredRun, rows: HeatRows, steps: Sequence[Step], around: Iterable[int]
) -> HeatMap:
    """Read the norms of a run; `around` are steps near which every single one is kept."""
    measured = np.array(run.measured_steps(), dtype=np.int64)
    grid = _grid(len(measured), rows, _zones(measured, around))
    totals = {step.step: step.total_norm for step in steps if step.total_norm is not None}
    usual = Usual(len(rows))
    parts = []
    details: dict[str, list[tuple[npt.NDArray[np.int64], Heights]]] = {}
    position = 0
    for chunk in run.stat_chunks():
        heights = rows.heights(chunk)
        total = np.array([totals.get(step, np.nan) for step in chunk.steps.tolist()])
        finite = np.isfinite(total) & ~chunk.broken().any(axis=1)
        deviations = usual.deviations(heights, total_logarithms(total), finite)
        end = position + len(chunk.steps)
        edges = grid.edges(position, end) - position
        parts.append(reduce_steps(chunk.steps, heights, deviations, edges))
        for name in DETAIL_MAPS:
            details.setdefault(name, []).extend(detail_heights(chunk, rows, name))
        position = end
    finest = _no_columns(len(rows))
    if parts:
        finest = joined(parts)
    thinned = {name: _thinned(found) for name, found in details.items() if found}
    return HeatMap(rows, finest, grid, thinned)


def _zones(measured: npt.NDArray[np.int64], around: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Where single steps are kept, as positions among the steps that were measured."""
    if not len(measured):
        return ()
    wanted = np.searchsorted(measured, sorted(set(around)))
    places = sorted(set(np.minimum(wanted, len(measured) - 1).tolist()))
    half = _ZONE_COLUMNS // (2 * max(1, len(places)))
    half = max(_NARROWEST_ZONE, min(_WIDEST_ZONE, half))
    return zones_around(places, half, len(measured))


def _grid(steps: int, rows: HeatRows, zones: tuple[tuple[int, int], ...]) -> Grid:
    """The finest grid that is worth keeping."""
    if steps * len(rows.names) <= _EXACT_CELLS:
        return Grid(1)
    most = max(MOST_COLUMNS, min(_FINEST_COLUMNS, _FINEST_CELLS // len(rows)))
    return Grid(grid_factor(steps, min(most, _first_level_columns(len(rows)) * 8)), zones)


def _first_level_columns(rows: int) -> int:
    return max(128, min(MOST_COLUMNS, _FIRST_LEVEL_CELLS // max(1, rows)))


def encoded_levels(heat: HeatMap) -> list[dict[str, Any]]:
    """The levels as the page takes them, the coarsest first."""
    finest = heat.finest
    if not len(finest):
        return []
    steps = int(finest.counts.sum())
    first = max(heat.grid.factor, grid_factor(steps, _first_level_columns(len(heat.rows))))
    exact = steps * len(heat.rows.names) <= _EXACT_CELLS
    coarsest = _level(heat, first, exact)
    room = min(_ROOM, _MOST_TEXT - encoded_size(coarsest))
    levels = []
    factor = heat.grid.factor
    while factor < first:
        level = _level(heat, factor, exact)
        if encoded_size(level) <= room:
            room -= encoded_size(level)
            levels.append(level)
            factor *= LEVEL_FACTOR
        else:
            factor *= 2
    return [coarsest, *reversed(levels)]


def _level(heat: HeatMap, factor: int, exact: bool) -> dict[str, Any]:
    columns = coarsened(heat.finest, replace(heat.grid, factor=factor))
    return {**encoded_level(columns, exact or fine_rows(columns, heat.rows)), "factor": factor}


def fine_rows(columns: Columns, rows: HeatRows) -> npt.NDArray[np.bool_]:
    """Which rows of a level get a second byte: all, the blocks, or none, as there is room.

    Where rows are many the page begins with blocks, and draws the line of one.
    """
    fine = np.full(len(rows), len(columns) * len(rows) <= _FINE_CELLS)
    fine[len(rows.names) :] = len(columns) * len(rows.blocks) <= _FINE_CELLS
    return fine


def detail_heights(
    chunk: StatChunk, rows: HeatRows, name: str
) -> list[tuple[npt.NDArray[np.int64], Heights]]:
    """The steps of a chunk at which what a map shows was measured, and its heights."""
    values = chunk.columns.get(DETAIL_MAPS[name])
    if values is None:
        return []
    at = np.flatnonzero(~np.isnan(values).all(axis=1))
    heights = heights_of(values[at])
    heights[np.isnan(values[at])] = ABSENT
    shown = rows.spread_out(chunk, heights)
    # A block's own number would need the sizes of its parameters: it shows the largest of theirs.
    for row, members in enumerate(rows.blocks.values(), len(rows.names)):
        shown[:, row] = shown[:, members].max(axis=1)
    return [(chunk.steps[at], shown)]


def _thinned(parts: list[tuple[npt.NDArray[np.int64], Heights]]) -> Columns:
    return map_columns(
        np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    )


def map_columns(steps: npt.NDArray[np.int64], heights: Heights) -> Columns:
    """A map of what was measured on some steps only."""
    grid = Grid(grid_factor(len(steps), max(32, _MAP_CELLS // heights.shape[1])))
    unknown = np.full_like(heights, np.nan)
    return reduce_steps(steps, heights, unknown, grid.edges(0, len(steps)))


def _no_columns(rows: int) -> Columns:
    nothing = np.zeros(0, dtype=np.int64)
    empty = np.zeros((0, rows), dtype=np.float32)
    return Columns(nothing, nothing, nothing, empty, empty, empty)
