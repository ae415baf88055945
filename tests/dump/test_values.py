"""Values, statistics and differences without torch, against torch and numpy."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradsight import GradientDumper
from gradsight.core import limits
from gradsight.dump import reader
from gradsight.dump.diff import compare, difference
from gradsight.dump.manifest import ITEM_BYTES, read
from gradsight.dump.statistics import BINS, QUANTILES, measure
from gradsight.dump.values import StoredValues, slabs, values, widen
from gradsight.errors import UsageError


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_is_widened_exactly(dtype: str) -> None:
    """All 65,536 two-byte patterns (or all bytes) against torch's own conversion."""
    raw = np.arange(65536, dtype="<u2").view(np.uint8).reshape(-1, ITEM_BYTES[dtype])
    ours = widen(raw, dtype)
    theirs = (
        torch.from_numpy(raw.reshape(-1).copy())
        .view(getattr(torch, dtype))
        .to(torch.complex128)
        .numpy()
    )
    with np.errstate(invalid="ignore"):
        wide = ours.astype(np.complex128).view(np.float64)
    assert np.array_equal(wide, theirs.view(np.float64), equal_nan=True)


def test_statistics_against_numpy() -> None:
    values = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)
    values[0, :5] = 0
    numbers = measure(values)
    flat = values.reshape(-1).astype(np.float64)
    assert numbers.count == 2000
    assert numbers.norm == pytest.approx(np.linalg.norm(flat), rel=1e-12)
    assert (numbers.minimum, numbers.maximum, numbers.zeros) == (flat.min(), flat.max(), 5)
    assert numbers.quantiles == tuple(np.quantile(flat, QUANTILES))
    assert sum(numbers.histogram) == 2000
    assert len(numbers.histogram) == BINS


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_the_norm_neither_overflows_nor_vanishes(size: float) -> None:
    assert measure(np.array([3.0, 4.0]) * size).norm == pytest.approx(5 * size)


def test_statistics_of_odd_gradients() -> None:
    numbers = measure(np.array([np.nan, np.inf, -np.inf, 2.0]))
    assert (numbers.nan, numbers.inf, numbers.minimum, numbers.maximum, numbers.norm) == (
        1,
        2,
        2.0,
        2.0,
        2.0,
    )
    assert math.isnan(measure(np.empty((0, 3))).norm)
    assert math.isnan(measure(np.array([np.nan])).minimum)
    assert measure(np.zeros(4)).norm == 0
    assert measure(np.array([3 + 4j])).norm == 5
    assert measure(np.array([3 + 4j], dtype=np.complex64)).maximum == 4


def test_difference() -> None:
    a = np.array([1.0, 2.0, -4.0])
    b = np.array([1.0, 2.0, -3.0])
    found = difference(0, "w", [(a, b)])
    assert (found.absolute, found.relative) == (1.0, 0.25)
    assert found.cosine == pytest.approx(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    assert difference(0, "w", [(a, -a)]).cosine == pytest.approx(-1)
    assert difference(0, "w", [(a, np.zeros(3))]).cosine is None


def test_difference_where_values_are_not_finite() -> None:
    """The same NaN and infinity on both sides are no difference; on one side they are one without
    end.
    """
    odd = np.array([np.nan, np.inf, 1.0])
    assert difference(0, "w", [(odd, odd.copy())]).relative == 0
    assert difference(0, "w", [(odd, np.array([np.nan, np.inf, 2.0]))]).relative == 0.5
    assert difference(0, "w", [(odd, np.array([0.0, np.inf, 1.0]))]).relative == math.inf
    assert difference(0, "w", [(odd, np.array([np.nan, -np.inf, 1.0]))]).relative == math.inf
    assert difference(0, "w", [(np.empty(0), np.empty(0))]).relative == 0


def dump(run: Path, model: nn.Module, step: int = 0, **options: int) -> Path:
    with GradientDumper(run, **options) as dumper:
        folder = dumper.dump(model, step)
    assert folder is not None
    return folder


def test_two_runs(tmp_path: Path, model: nn.Module) -> None:
    """The worst first; what is missing or of another shape is worse than any difference."""
    one = dump(tmp_path / "a", model, 0)
    dump(tmp_path / "a", model, 5)
    model[0].bias.grad *= 1.5
    model[1].bias.grad = None
    model[0].weight = nn.Parameter(torch.ones(7, 6))
    model[0].weight.grad = torch.ones(7, 6)
    other = dump(tmp_path / "b", model, 0)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [(each.parameter, each.relative) for each in found[:2]] == [
        ("0.weight", math.inf),
        ("1.bias", math.inf),
    ]
    assert found[0].note == "shape [7, 5] against [7, 6]"
    assert found[1].note == f"not in {other}"
    assert found[2].parameter == "0.bias"
    assert found[2].relative == pytest.approx(1 / 3)
    assert found[3].relative == 0
    assert [each.parameter for each in compare(one, other)] == [each.parameter for each in found]


def test_another_dtype_is_noted(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    dump(tmp_path / "a", model)
    dump(tmp_path / "b", model.bfloat16())
    (only,) = compare(tmp_path / "a", tmp_path / "b")
    assert (only.relative, only.note) == (0.0, "float32 against bfloat16")


def test_nothing_to_compare(tmp_path: Path, model: nn.Module) -> None:
    dump(tmp_path / "a", model, 1)
    dump(tmp_path / "b", model, 2, save_first_n=2)
    text = (
        "nothing to compare: .* has full_gradients of steps 1, .* has sampled_gradients of steps 2"
    )
    with pytest.raises(UsageError, match=text):
        compare(tmp_path / "a", tmp_path / "b")


def test_large_gradients_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and parts of a few entries give what the whole gives, whatever the chunks."""
    big = nn.Linear(40, 30, bias=False)
    gradient = torch.randn(30, 40)
    big.weight.grad = gradient
    dump(tmp_path / "a", big)
    big = nn.Linear(40, 30, bias=False).double()
    big.weight.grad = gradient.double() + 1e-3
    other = dump(tmp_path / "b", big)
    (whole,) = compare(tmp_path / "a", tmp_path / "b")
    entry = read(other).tensors["weight"]
    numbers = measure(values(other, "weight", entry))
    monkeypatch.setattr(reader, "BLOCK", 64)
    monkeypatch.setattr(limits, "ENTRIES_AT_ONCE", 7)
    (parts,) = compare(tmp_path / "a", tmp_path / "b")
    assert (parts.absolute, parts.relative) == (whole.absolute, whole.relative)
    assert parts.cosine == pytest.approx(whole.cosine, rel=1e-12)
    again = measure(StoredValues(other, "weight", entry))
    assert again.histogram == numbers.histogram
    assert again.quantiles == numbers.quantiles
    assert again.norm == pytest.approx(numbers.norm, rel=1e-12)
    monkeypatch.setattr(limits, "ENTRIES_SORTED", 7)
    assert measure(StoredValues(other, "weight", entry)).quantiles == ()


@pytest.mark.parametrize("shape", [(), (5,), (0, 7), (3, 4, 5), (1, 1, 50), (50, 1), (2, 3, 0)])
@pytest.mark.parametrize("most", [1, 4, 7, 1000])
def test_slabs_are_the_whole_in_its_order(shape: tuple[int, ...], most: int) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = [whole[index].reshape(-1) for index in slabs(shape, most)]
    assert all(len(part) <= most for part in parts)
    assert np.concatenate(parts).tolist() == whole.reshape(-1).tolist()
