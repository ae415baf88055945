"""Histograms as trackers draw them: bins of one width, and what lies beyond them beside."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from gradsight.measure.histogram import exact_histogram
from gradsight.values.histograms import Histogram

RNG = np.random.default_rng(0)
GRADIENTS = {
    "bell": RNG.normal(0, 0.03, 20_000),
    "heavy tails": RNG.standard_t(2, 20_000) * 0.01,
    "very heavy tails": RNG.standard_cauchy(20_000),
    "lopsided": np.concatenate([RNG.normal(0, 0.01, 10_000), [5.0] * 90]),
    "all alike": np.full(50, 0.3),
    "zeros": np.zeros(10),
    "mostly zeros": np.concatenate([np.zeros(1000), RNG.normal(0, 1, 200)]),
}


def histogram_of(values: np.ndarray) -> Histogram:
    return exact_histogram(torch.from_numpy(values).float())


@pytest.mark.parametrize("name", GRADIENTS)
def test_every_entry_is_in_a_bin_or_beside_them(name: str) -> None:
    values = GRADIENTS[name].astype(np.float32)
    histogram = histogram_of(values)
    counts, edges = histogram.linear()
    below, above = histogram.outside()
    assert sum(counts) + below + above == pytest.approx(len(values))
    assert below == np.count_nonzero(values <= edges[0])
    assert above == np.count_nonzero(values >= edges[-1])
    assert histogram.outside_share == pytest.approx((below + above) / len(values))
    assert below + above <= 0.01 * np.count_nonzero(values)


@pytest.mark.parametrize("name", ["bell", "heavy tails", "very heavy tails", "mostly zeros"])
def test_there_are_no_horns(name: str) -> None:
    counts, _ = histogram_of(GRADIENTS[name]).linear()
    within_the_last_power = len(counts) // 4
    for end in (counts[:within_the_last_power], counts[::-1][:within_the_last_power]):
        assert end[0] <= 1.001 * max(end[1:])
        assert end[0] == pytest.approx(end[1])


@pytest.mark.parametrize("name", GRADIENTS)
def test_bins_are_of_one_width_around_zero(name: str) -> None:
    counts, edges = histogram_of(GRADIENTS[name]).linear()
    assert len(edges) == len(counts) + 1
    assert len(counts) % 2 == 1
    assert edges[0] == -edges[-1]
    widths = [high - low for low, high in pairwise(edges)]
    assert widths == pytest.approx([widths[0]] * len(widths))


def test_the_counts_of_a_bell_are_numpys() -> None:
    values = GRADIENTS["bell"]
    counts, edges = histogram_of(values).linear(bins=33)
    expected, _ = np.histogram(values, edges)
    # Within a power of two the entries are spread evenly.
    assert np.abs(np.array(counts) - expected).max() < 0.05 * len(values)
    assert sum(counts[:16]) == pytest.approx(expected[:16].sum(), rel=0.03)


def test_what_is_not_finite_is_neither_in_nor_outside() -> None:
    values = np.array([0.5, 0.25, -0.5, np.nan, np.inf, -np.inf])
    histogram = histogram_of(values)
    assert sum(histogram.linear()[0]) == pytest.approx(3)
    assert histogram.outside() == (0, 0)
    assert (histogram.nan, histogram.inf) == (1, 2)
