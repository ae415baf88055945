"""Packed text, unpacked again by a plain twin: how far off a norm can be, and what is no number."""

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradsight.show.page.encode import codes_of, encoded_level, encoded_size, row_scales
from gradsight.show.page.heat import fine_rows
from gradsight.show.page.heights import HeatRows, heights_of
from gradsight.show.page.pyramid import Grid, reduce_steps

NORMS = st.one_of(
    st.floats(1e-12, 1e6), st.sampled_from([0.0, -1.0, float("inf"), float("nan"), 1e-40, 3e38])
)


def decoded(norms: np.ndarray, fine: bool) -> np.ndarray:
    """Norms as a page reads them; rows are columns here, as everywhere before packing."""
    heights = heights_of(norms)
    scales = row_scales(heights, heights)
    codes, parts = codes_of(heights, scales)
    within = np.full(codes.shape, 0.5)
    rows = scales.wide | fine
    within[:, rows] = ((parts + 0.5) / scales.parts)[:, rows]
    values = np.exp2(scales.base + (codes.astype(float) - 1 + within) * scales.unit)
    for code, value in ((0, 0.0), (253, -1.0), (254, np.inf), (255, np.nan)):
        values[codes == code] = value
    return values


@settings(max_examples=200, deadline=None)
@given(norms=arrays(np.float64, (12, 3), elements=NORMS), fine=st.booleans())
def test_no_norm_is_further_off_than_promised(norms: np.ndarray, fine: bool) -> None:
    got = decoded(norms, fine)
    special = ~(np.isfinite(norms) & (norms > 0))
    np.testing.assert_array_equal(got[special], norms[special])
    np.testing.assert_allclose(got[~special], norms[~special], rtol=0.002 if fine else 0.095)


def unpacked(text: str, kind: str = "u1") -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind)


def test_planes_are_packed_row_by_row() -> None:
    norms = np.exp2(np.random.default_rng(0).normal(-4, 1, (64, 3)))
    heights = heights_of(norms)
    columns = reduce_steps(np.arange(64), heights, heights * 0, Grid(8).edges(0, 64))
    level = encoded_level(columns, fine=False)
    scales = row_scales(columns.low, columns.high)
    high = codes_of(columns.high, scales)[0]
    low = codes_of(columns.low, scales)[0]
    deltas = unpacked(level["high"]).reshape(3, 8)
    assert (np.cumsum(deltas, axis=1, dtype=np.uint8) == high.T).all()
    assert (unpacked(level["depth"]).reshape(3, 8) == (high - low).T).all()
    assert np.cumsum(unpacked(level["starts"], "<u4")).tolist() == list(range(0, 64, 8))
    assert not level["whole"]
    assert "fine" not in level
    assert encoded_size(level) == sum(len(text) for text in level.values() if isinstance(text, str))


def test_a_row_of_extremes_gets_its_second_byte_by_itself() -> None:
    norms = np.array([[1e-38, 1.0], [1e38, 2.0], [1.0, 4.0]])
    heights = heights_of(norms)
    columns = reduce_steps(np.arange(3), heights, heights * 0, np.arange(3))
    level = encoded_level(columns, fine=False)
    assert np.cumsum(unpacked(level["fine"], "<u4")).tolist() == [0]
    assert decoded(norms, fine=False)[:, 0] == pytest.approx(norms[:, 0], rel=0.002)


def test_blocks_get_their_second_byte_before_parameters_do() -> None:
    names = [f"layers.{layer}.{part}" for layer in range(100) for part in ("q", "k", "v", "out")]
    rows = HeatRows(names)
    for steps, fine_names, fine_blocks in (
        (500, True, True),
        (1000, False, True),
        (4000, False, False),
    ):
        heights = np.zeros((steps, len(rows)), dtype=np.float32)
        columns = reduce_steps(np.arange(steps), heights, heights, np.arange(steps))
        fine = fine_rows(columns, rows)
        assert fine[: len(names)].tolist() == [fine_names] * 400
        assert fine[len(names) :].tolist() == [fine_blocks] * 100
