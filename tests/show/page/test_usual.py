"""Deviations of thousands of steps at once: the judge's own baseline, step by step, is the twin."""

import math

import numpy as np
import pytest

from gradsight.health.baseline import Baseline, logarithms
from gradsight.show.page.heights import heights_of
from gradsight.show.page.usual import Usual, total_logarithms


def of_judge(norms: np.ndarray, totals: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """What the judge's baseline says of every step, before the step enters it."""
    baseline = Baseline()
    result = np.full(norms.shape, np.nan)
    for step, row in enumerate(norms):
        known = np.where(row < 0, np.nan, row)
        logs = logarithms(known, float(totals[step]))
        if baseline.median is not None and baseline.spread is not None:
            away = (logs - baseline.median) / baseline.spread
            usable = np.isfinite(row) & (row >= 0) & (baseline.median[:-1] > -50)
            result[step] = np.where(usable, away[:-1], np.nan)
        baseline.enter(logs, bool(finite[step] and math.isfinite(totals[step])))
    return result


def awkward(steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noise with spikes, NaN, zeros, missing gradients, a new level, and a frozen parameter."""
    random = np.random.default_rng(steps)
    norms = np.exp2(random.normal(-4, 0.4, (steps, 6)))
    norms[steps // 3] *= 500  # an outlier, which stays out
    norms[steps // 2 : steps // 2 + 40] *= 1000  # a new level after 25 steps
    norms[:, 4] = 0.0
    norms[random.random(steps) < 0.1, 5] = 0.0
    norms[random.random(steps) < 0.2, 3] = -1.0
    norms[[70, 71, 200], 1] = [np.nan, np.inf, np.nan]
    there = np.where(norms < 0, 0.0, norms)
    totals = np.sqrt((there**2).sum(axis=1))
    return norms, totals, np.isfinite(norms).all(axis=1)


@pytest.mark.parametrize("chunk", [1000, 64, 7])
def test_deviations_are_the_judges(chunk: int) -> None:
    norms, totals, finite = awkward(600)
    usual = Usual(norms.shape[1])
    parts = []
    for start in range(0, len(norms), chunk):
        part = slice(start, start + chunk)
        logs = total_logarithms(totals[part])
        usable = finite[part] & np.isfinite(totals[part])
        parts.append(usual.deviations(heights_of(norms[part]), logs, usable))
    expected = of_judge(norms, totals, finite)
    got = np.concatenate(parts)
    assert np.isfinite(expected).mean() > 0.6  # there is something to compare
    # Zeros lie hundreds of spreads below: there the single precision shows.
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-3)
