"""Columns of minimum and maximum: against a loop, whole or in chunks, level from level."""

import numpy as np
import pytest

from gradsight.show.page.heights import ABSENT, ZERO, heights_of
from gradsight.show.page.pyramid import (
    FAR,
    Columns,
    Grid,
    coarsened,
    joined,
    reduce_steps,
    zones_around,
)

NOTHING = np.float32(np.nan)


def awkward(steps: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Heights with every kind of cell, and deviations."""
    random = np.random.default_rng(steps)
    norms = np.exp2(random.normal(-4, 3, (steps, rows)))
    for value in (0.0, -1.0, np.inf, np.nan):
        norms[random.random(norms.shape) < 0.03] = value
    norms[:, 0] = -1.0
    deviations = random.normal(0, 2.5, norms.shape).astype(np.float32)
    deviations[random.random(norms.shape) < 0.1] = np.nan
    return heights_of(norms), deviations


def of_loop(heights: np.ndarray, deviations: np.ndarray) -> tuple[float, float, float]:
    """Lowest, highest and deviation of one column of one row, as the words say it."""
    there = [height for height in heights.tolist() if height != ABSENT]
    highest = max(there, default=ABSENT)
    if any(np.isnan(there)):
        highest = np.nan
    numbers = [height for height in there if np.isfinite(height)]
    known = [each for each in deviations.tolist() if not np.isnan(each)]
    furthest = max(known, key=abs, default=np.nan)
    shown = furthest if known and abs(furthest) > FAR else np.nan
    if known and np.isnan(shown):
        shown = float(np.mean(known))
    return min(numbers, default=highest), highest, shown


@pytest.mark.parametrize("factor", [1, 4, 16])
def test_columns_are_what_a_loop_makes_of_them(factor: int) -> None:
    heights, deviations = awkward(150, 6)
    grid = Grid(factor, zones_around([60, 140], 5, 150))
    edges = grid.edges(0, 150)
    columns = reduce_steps(np.arange(150) * 10, heights, deviations, edges)
    ends = [*edges[1:], 150]
    for place, (start, end) in enumerate(zip(edges, ends, strict=True)):
        assert (columns.starts[place], columns.lasts[place]) == (start * 10, (end - 1) * 10)
        for row in range(6):
            expected = of_loop(heights[start:end, row], deviations[start:end, row])
            got = columns.low[place, row], columns.high[place, row], columns.deviation[place, row]
            assert got == pytest.approx(expected, nan_ok=True, rel=1e-5)


def test_every_step_near_a_finding_is_a_column() -> None:
    grid = Grid(64, zones_around([500], 20, 5000))
    edges = grid.edges(0, 5000)
    assert set(range(480, 521)) <= set(edges.tolist())
    assert 521 in edges  # or the last single step would hold what follows it, too
    assert np.diff(edges).max() == 64


def same(one: Columns, other: Columns) -> None:
    for name in ("starts", "lasts", "counts", "low", "high"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_allclose(one.deviation, other.deviation, rtol=1e-4)


def test_a_coarser_level_is_made_of_the_finer_one() -> None:
    heights, deviations = awkward(1000, 5)
    # A mean of means is the mean only where nothing is far and everything is known.
    deviations[~(np.abs(deviations) < 3.5)] = 0.0
    zones = zones_around([300], 12, 1000)
    fine = reduce_steps(np.arange(1000), heights, deviations, Grid(4, zones).edges(0, 1000))
    direct = reduce_steps(np.arange(1000), heights, deviations, Grid(32, zones).edges(0, 1000))
    same(coarsened(fine, Grid(32, zones)), direct)


def test_chunks_give_what_the_whole_gives() -> None:
    heights, deviations = awkward(1000, 5)
    grid = Grid(8, zones_around([512], 20, 1000))
    parts = []
    for first, last in ((0, 512), (512, 1000)):
        part = slice(first, last)
        edges = grid.edges(first, last) - first
        parts.append(reduce_steps(np.arange(1000)[part], heights[part], deviations[part], edges))
    whole = reduce_steps(np.arange(1000), heights, deviations, grid.edges(0, 1000))
    same(joined(parts), whole)


def test_one_spike_and_one_dip_survive_any_thinning() -> None:
    heights = np.full((10_000, 2), -3.0, dtype=np.float32)
    heights[7123, 0] = 9.0
    heights[7124, 0] = -20.0
    heights[7125, 1] = ZERO
    edges = Grid(2048).edges(0, 10_000)
    columns = reduce_steps(np.arange(10_000), heights, np.full_like(heights, NOTHING), edges)
    assert (columns.high[:, 0].max(), columns.low[:, 0].min()) == (9.0, -20.0)
    assert columns.low[:, 1].min() == ZERO
