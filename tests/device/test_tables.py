"""The tables of the other parts on the device: what they measure, score, dump and judge there."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import gradsight
from device.tensors import moved, peek
from ghost.models import build
from ghost.test_table import observe
from gradsight.errors import GradsightWarning
from gradsight.measure.histogram import HistogramReading
from gradsight.measure.host_copy import HostCopy
from gradsight.measure.norms import NormReading, exact_norms, recount
from measure.test_measure import GRADIENTS

ONLY_ON_THE_CPU = {
    "huge": "squares leave float32",
    "tiny": "squares leave float32",
    "tiny subnormal": "squares leave float32",
    "sparse": "the device has no sparse tensors",
}
MEASURED = [name for name in GRADIENTS if name not in ONLY_ON_THE_CPU]
SCORED = ["mlp", "convnet", "transformer", "checkpointed"]
"""Fused LSTM cells and resized storages cannot be simulated."""


def there(value: Any, device: torch.device) -> Any:
    """Tensors on the device, whatever holds them."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


@pytest.mark.parametrize("name", MEASURED)
def test_measurements_equal_the_loop(name: str, device: torch.device) -> None:
    gradient = GRADIENTS[name]()
    exact = exact_norms([gradient])
    placed = gradient.to(device)
    reading = NormReading([placed])
    histogram = HistogramReading([placed], offset=0)
    norms = recount([placed], reading.read())
    np.testing.assert_allclose(norms.l2, exact.l2, rtol=1e-4)
    np.testing.assert_allclose(norms.max_abs, exact.max_abs, rtol=1e-6)
    for found, right in zip(norms.counts or (), exact.counts or (), strict=False):
        assert found.tolist() == right.tolist()
    right_bins = HistogramReading([gradient], offset=0).read()
    np.testing.assert_array_equal(histogram.read(), right_bins)


@pytest.mark.parametrize("name", SCORED)
def test_scores_equal_the_cpus(name: str, device: torch.device) -> None:
    right = build(name, torch.float32)
    right.model.train()
    expected = observe(right)[0].scores.total
    case = build(name, torch.float32)
    case = replace(
        case,
        model=moved(case.model.train(), device),
        batch=there(case.batch, device),
        validation=there(case.validation, device),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradsightWarning)
        engine, _ = observe(case)
    found = peek(engine.scores.total)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def with_gradients(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = moved(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 30)), device)
    model(torch.randn(3, 5).to(device)).square().mean().backward()
    return model


@pytest.mark.parametrize("options", [{}, {"save_first_n": 2}, {"asynchronous": False}])
def test_a_dump_is_of_its_moment(
    options: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    model = with_gradients(device)
    expected = {name: peek(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    with gradsight.GradientDumper(tmp_path, **options) as dumper:
        folder = dumper.dump(model, 3)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(7.0)  # behind the dump, which may not have been copied yet
    assert folder is not None
    if "save_first_n" in options:
        from safetensors.torch import load_file

        for name, gradient in expected.items():
            (path,) = folder.rglob(f"{name}_first2.safetensors")
            assert torch.equal(load_file(path)["gradient"], gradient[:2])
        return
    full = folder if folder.name == "full_gradients" else folder / "full_gradients"
    for name, loaded in zip(expected, gradsight.load_keys(full, list(expected)), strict=True):
        assert torch.equal(loaded, expected[name])


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_one_look_judges_alike(bad: float | None, device: torch.device) -> None:
    reports = []
    for place in (torch.device("cpu"), device):
        model = with_gradients(place)
        if bad is not None:
            for parameter in model[1].parameters():  # type: ignore[index]
                assert parameter.grad is not None
                parameter.grad.flatten()[0] = bad
        reports.append(gradsight.check_gradient_health(model, quiet=True))
    right, found = reports
    assert found.status == right.status
    assert [each.code for each in found.findings] == [each.code for each in right.findings]
    counts = [(each.nan_count, each.inf_count, each.zero_count) for each in reports]
    assert counts[0] == counts[1]
    assert found.total_norm == pytest.approx(right.total_norm, rel=1e-5, nan_ok=True)


class Logged:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: dict[str, float] = {}

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.rows[name] = value


def test_the_distribution_is_the_cpus(device: torch.device) -> None:
    tracker = Logged()
    norms = gradsight.log_gradient_distribution(with_gradients(device), tracker, 0)
    right = gradsight.log_gradient_distribution(with_gradients(torch.device("cpu")), Logged(), 0)
    assert norms == pytest.approx(right, rel=1e-5)
    assert tracker.rows.keys() >= {f"gradients/{name}/norm" for name in norms}


# The tables can fail.


def test_without_the_wait_they_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from device.simulated import simulated

    monkeypatch.setattr(HostCopy, "read", lambda copy: copy._host.double().numpy().copy())
    with simulated() as place:
        gradient = GRADIENTS["matrix"]().to(place.device)
        assert np.isnan(NormReading([gradient]).read().l2).all()
        norms = gradsight.log_gradient_distribution(with_gradients(place.device), Logged(), 0)
    assert all(np.isnan(list(norms.values())))
