"""Every fast measurement against its plain twin in float64, over a table of awkward gradients."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsight.measure.flatten import flat
from gradsight.measure.histogram import (
    COLUMNS,
    HistogramReading,
    exact_histogram,
    histograms,
    share_within_a_tenth,
)
from gradsight.measure.host_copy import HostCopy
from gradsight.measure.norms import PIECE, NormReading, combine, exact_norms, recount
from gradsight.measure.rank_table import merge_tables
from gradsight.measure.sample import LARGEST, Sample, stride_for
from gradsight.measure.update import UpdateReading, likeness, root_mean_squares, update_ratios


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    ).to(dtype)


def sparse() -> Tensor:
    indices = torch.tensor([[0, 2, 0, 3]])
    return torch.sparse_coo_tensor(indices, normal(4, 5), (6, 5), check_invariants=True)


def poisoned(*bad: float) -> Tensor:
    values = normal(1000)
    values[17 : 17 + len(bad)] = torch.tensor(bad)
    return values


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: normal(768),
    "matrix": lambda: normal(64, 33),
    "four dimensions": lambda: normal(4, 3, 5, 5),
    "zero-dimensional": lambda: normal(1).reshape(()),
    "empty": lambda: torch.zeros(0, 5),
    "zeros": lambda: torch.zeros(100),
    "several pieces": lambda: normal(2 * PIECE + 12345),
    "transposed": lambda: normal(40, 30).t(),
    "every second column": lambda: normal(40, 30)[:, ::2],
    "expanded": lambda: normal(1, 30).expand(40, 30),
    "channels last": lambda: normal(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "double": lambda: normal(500, dtype=torch.float64),
    "bfloat16": lambda: normal(5000, dtype=torch.bfloat16),
    "float16": lambda: normal(5000, dtype=torch.float16),
    "complex": lambda: torch.complex(normal(50), normal(50) * 2),
    "sparse": sparse,
    "huge": lambda: normal(1000, scale=1e30),
    "tiny": lambda: normal(1000, scale=1e-30),
    "tiny subnormal": lambda: normal(1000, scale=1e-41),
    "huge double": lambda: normal(1000, scale=1e200, dtype=torch.float64),
    "tiny double": lambda: normal(1000, scale=1e-200, dtype=torch.float64),
    "one nan": lambda: poisoned(math.nan),
    "infinities": lambda: poisoned(math.inf, -math.inf),
    "both": lambda: poisoned(math.nan, math.inf, math.nan),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_norms_equal_the_loop(name: str) -> None:
    gradient = GRADIENTS[name]()
    before = gradient.clone()
    norms = recount([gradient], NormReading([gradient]).read())
    exact = exact_norms([gradient])
    np.testing.assert_allclose(norms.l2, exact.l2, rtol=2e-6)
    np.testing.assert_allclose(norms.max_abs, exact.max_abs, rtol=1e-7)
    np.testing.assert_array_equal(norms.counts or np.zeros((2, 1)), exact.counts)
    assert norms.total == pytest.approx(exact.total, rel=2e-6, nan_ok=True)
    assert torch.equal(gradient.to_dense().nan_to_num(), before.to_dense().nan_to_num()), (
        "looking changed the gradient"
    )


def test_all_of_them_at_once_equal_the_loop() -> None:
    gradients = [make() for make in GRADIENTS.values()]
    norms = recount(gradients, NormReading(gradients).read())
    exact = exact_norms(gradients)
    np.testing.assert_allclose(norms.l2, exact.l2, rtol=2e-6)
    np.testing.assert_allclose(norms.max_abs, exact.max_abs, rtol=1e-7)
    np.testing.assert_array_equal(norms.counts, exact.counts)


def test_without_a_closer_look_a_bad_count_is_unknown_not_zero() -> None:
    norms = NormReading([poisoned(math.nan), normal(5)]).read()
    assert norms.counts is not None
    assert norms.counts[0].tolist() == [-1, 0]


@given(st.lists(st.floats(min_value=0, max_value=1e300), min_size=1, max_size=20))
def test_norms_combine_without_overflow(values: list[float]) -> None:
    assert combine(np.array(values)) == pytest.approx(math.hypot(*values), rel=1e-12)


def test_ranks_merge() -> None:
    first = np.array([[3.0, 2.0, 0, 0, 1], [1.0, 1.0, -1, 0, 1], [0, 0, 0, 0, 0]])
    second = np.array([[4.0, 1.0, 2, 0, 1], [math.nan, math.nan, 3, 1, 1], [0, 0, 0, 0, 0]])
    merged = merge_tables(np.stack([first, second]))
    assert merged[0].tolist() == [5.0, 2.0, 2, 0, 1]
    assert math.isnan(merged[1, 0])
    assert merged[1, 2:].tolist() == [-1, 1, 1]
    assert merged[2].tolist() == [0] * 5


@pytest.mark.parametrize(
    "name",
    [name for name in GRADIENTS if name not in ("complex", "several pieces", "empty")],
)
def test_histograms_equal_the_loop(name: str) -> None:
    gradient = GRADIENTS[name]()
    if gradient.dtype is torch.float64 and "double" in name and name != "double":
        gradient = gradient.clamp(
            -3e38, 3e38
        )  # beyond float32 the last bin or underflow takes them
    found, everything = histograms(HistogramReading([gradient]).read(), ["x"], 0)
    expected = exact_histogram(gradient.to_dense(), "x")
    if gradient.dtype is torch.float64:
        assert sum(found.positive) == sum(expected.positive)
        assert (found.zero, found.underflow, found.nan, found.inf) == (
            expected.zero,
            expected.underflow,
            expected.nan,
            expected.inf,
        )
    else:
        assert found == expected
    assert everything.positive == found.positive
    assert everything.size == gradient.numel()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=60))
def test_any_floats_are_classed_right(values: list[float]) -> None:
    gradient = torch.tensor(values, dtype=torch.float32)
    assert histograms(HistogramReading([gradient]).read(), ["x"], 0)[0] == exact_histogram(
        gradient, "x"
    )


def test_a_large_tensor_is_sampled_and_says_how_well() -> None:
    gradient = normal(300, 1000, scale=0.05)
    found, _ = histograms(HistogramReading([gradient], offset=3).read(), ["x"], 0)
    exact = exact_histogram(gradient, "x")
    assert found.sampled <= LARGEST
    assert found.size == 300_000
    assert 0 < found.error < 0.005
    shares = {found.low + k: count / found.sampled for k, count in enumerate(found.positive)}
    for k, count in enumerate(exact.positive):
        assert abs(shares.get(exact.low + k, 0.0) - count / exact.size) < 4 * found.error


@pytest.mark.parametrize("rows", [0, 3, 500])
def test_a_sparse_gradient_has_the_histogram_of_the_dense_one(rows: int) -> None:
    torch.manual_seed(0)
    indices = torch.randint(500, (1, rows))  # with repeated rows, which add up
    gradient = torch.sparse_coo_tensor(indices, normal(rows, 20), (500, 20), check_invariants=True)
    counters = HistogramReading([gradient]).read()
    np.testing.assert_array_equal(counters, HistogramReading([gradient.to_dense()]).read())
    assert histograms(counters, ["x"], 0)[0] == exact_histogram(gradient.to_dense(), "x")


def test_a_large_sparse_gradient_is_sampled_in_proportion() -> None:
    torch.manual_seed(0)
    rows = torch.randperm(4000)[:1000]
    values = normal(1000, 300)
    gradient = torch.sparse_coo_tensor(rows[None], values, (4000, 300), check_invariants=True)
    counters = HistogramReading([gradient], offset=3).read()
    found, everything = histograms(counters, ["x"], 0)
    assert found.size == everything.size == 1_200_000
    assert found.sampled == found.zero + sum(found.positive) + sum(found.negative)
    assert found.sampled < 300_000
    assert found.zero / found.sampled == pytest.approx(0.75, abs=1e-5)
    assert everything.zero == pytest.approx(900_000, rel=1e-4)


def test_the_histogram_over_all_weighs_samples_by_what_they_stand_for() -> None:
    large, small = torch.full((1000, 1000), 0.5), torch.full((10,), 8.0)
    counters = HistogramReading([large, small]).read()
    everything = histograms(counters, ["large", "small"], 0)[-1]
    counts = {everything.low + k: count for k, count in enumerate(everything.positive)}
    assert counts[-1] == pytest.approx(1_000_000)
    assert counts[3] == pytest.approx(10)
    assert share_within_a_tenth(counters) == 0
    assert counters.shape == (2, COLUMNS + 3)


@pytest.mark.parametrize(
    "shape",
    [(768, 768), (50257, 768), (3072, 768), (1024, 1024), (7, 11, 13), (2**20,), (65536, 64)],
)
def test_samples_visit_every_column(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    stride = stride_for(size, LARGEST, shape)
    visited = np.arange(0, size, stride)
    assert len(visited) <= LARGEST
    assert len(visited) > LARGEST / 2 or stride == 1
    assert len(np.unique(visited % shape[-1])) == min(shape[-1], len(visited))


def test_a_sample_reads_small_tensors_in_full() -> None:
    sample = Sample([normal(100), normal(10, 10)], offset=5)
    assert sample.sizes == sample.full_sizes == [100, 100]


def test_update_ratio_and_its_error() -> None:
    weight, step = normal(1200, 1000), normal(1200, 1000, scale=0.01).flip(0)
    look = UpdateReading([weight, torch.zeros(4)], offset=1)
    true = float(step.norm() / weight.norm())
    weight += step
    look.finish()
    (ratio, nothing), (error, _) = update_ratios(look.read())
    assert 0 < error < 0.01 * ratio
    assert abs(ratio - true) < 4 * error
    assert math.isnan(nothing)


def test_sizes_of_weight_and_update() -> None:
    weight = normal(30, 20)
    old = weight.double().clone()
    look = UpdateReading([weight], offset=3)
    weight += normal(30, 20, scale=0.1)
    look.finish()
    ((before,), (update,)) = root_mean_squares(look.read())
    assert before == pytest.approx(float(old.square().mean().sqrt()), rel=1e-12)
    added = weight.double() - old
    assert update == pytest.approx(float(added.square().mean().sqrt()), rel=1e-5)


def test_weights_are_compared_with_what_the_step_before_left() -> None:
    kept, clamped, drawn = normal(400), normal(400), normal(400)
    weights = [kept, clamped, drawn]
    first = UpdateReading(weights, offset=0)
    left = first.finish(keep=True)
    clamped.clamp_(-1, 1)
    drawn.copy_(normal(400).flip(0))
    second = UpdateReading(weights, offset=1, left=left)
    second.finish()
    alike = likeness(second.read())
    assert alike[0] == pytest.approx(1.0)
    assert alike[1] > 0.9
    assert abs(alike[2]) < 0.3
    assert np.isnan(likeness(first.read())).all()
    others = UpdateReading([kept], offset=1, left=left)
    others.finish()
    assert np.isnan(likeness(others.read())).all()


def test_an_unchanged_weight_has_ratio_zero() -> None:
    look = UpdateReading([normal(50)])
    look.finish()
    ratio, error = update_ratios(look.read())
    assert (ratio[0], error[0]) == (0, 0)


def test_flat_shares_memory_where_it_can() -> None:
    for name in ("vector", "matrix", "transposed", "channels last", "complex"):
        gradient = GRADIENTS[name]()
        assert flat(gradient).data_ptr() == gradient.data_ptr(), name
        assert flat(gradient).dim() == 1
    assert torch.equal(
        flat(GRADIENTS["every second column"]()), GRADIENTS["every second column"]().reshape(-1)
    )


def test_arrival_on_the_host_is_there_at_once() -> None:
    arrival = HostCopy.of(torch.tensor([1.0, 2.0]))
    assert arrival.ready()
    assert arrival.read().tolist() == [1.0, 2.0]
