"""Memory while training runs, before it starts, and the batch that fits."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gradsight import MemoryMonitor, predict_peak_memory
from gradsight.errors import UsageError
from gradsight.memory.monitor import tensor_bytes
from gradsight.memory.predict import largest, largest_batch
from gradsight.memory.startup import startup_report


class Scalars(list[tuple[str, float, int]]):
    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.append((name, value, step))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tracker = Scalars()
    found = MemoryMonitor().sample(tracker, 7)
    assert [name for name, _, _ in tracker] == [
        "memory/rss_gb",
        "memory/peak_rss_gb",
        "memory/tensor_gb",
    ]
    assert {name: value for name, value, _ in tracker} == found
    assert {step for _, _, step in tracker} == {7}
    assert 0.05 < found["memory/rss_gb"] <= found["memory/peak_rss_gb"] < 100


def test_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for number, name in enumerate(("memory_allocated", "memory_reserved", "max_memory_allocated")):
        monkeypatch.setattr(torch.cuda, name, lambda number=number: (number + 1) * 10**9)
    assert MemoryMonitor().sample(None, 0) == {
        "memory/gpu_allocated_gb": 1.0,
        "memory/gpu_reserved_gb": 2.0,
        "memory/gpu_max_allocated_gb": 3.0,
    }


def test_only_when_due() -> None:
    monitor, tracker = MemoryMonitor(log_every=3), Scalars()
    assert [bool(monitor.sample(tracker, step)) for step in range(7)] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert {step for _, _, step in tracker} == {0, 3, 6}
    for wrong in (0, 2.5, True, 10**30, "3"):
        with pytest.raises(UsageError, match="log_every must be "):
            MemoryMonitor(log_every=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"step must be a whole number of 0 or more, got 1\.5"):
        monitor.sample(tracker, 1.5)  # type: ignore[arg-type]


def test_live_tensors_and_gradients_are_counted_once() -> None:
    before = tensor_bytes()
    weight = torch.zeros(1_000_000, requires_grad=True)
    view = weight.detach()[::2]
    assert tensor_bytes() - before == 4_000_000
    weight.sum().backward()
    assert tensor_bytes() - before == 8_000_000
    del weight, view
    assert tensor_bytes() - before <= 0


@pytest.mark.parametrize("memory", [99, 107, 500, 501, 1000, 10**9])
def test_the_largest_size_that_fits(memory: int) -> None:
    calls = []

    def peak(size: int) -> int:
        calls.append(size)
        return max(107, 100 + 7 * size, 13 * size - 400)

    found = largest(peak, memory)
    assert found == 0 or peak(found) <= memory
    assert found >= (1 << 20) - 1 or peak(found + 1) > memory
    assert len(calls) < 25


@pytest.mark.slow
def test_the_largest_batch(make_gpt: Callable[..., Any]) -> None:
    def build_for(size: int) -> Callable[[], Any]:
        return lambda: make_gpt(batch=size, depth=2)

    memory = predict_peak_memory(build_for(6), policy="full").peak_bytes
    assert largest_batch(build_for, memory, policy="full") == 6
    assert largest_batch(build_for, memory) < 6


def test_startup_report(make_gpt: Callable[..., Any]) -> None:
    def build_for(size: int) -> Callable[[], Any]:
        return lambda: make_gpt(batch=size)

    report = startup_report(build_for, 4, policy="full", memory=3_000_000)
    text = str(report).splitlines()
    assert text[0] == "Device: cpu, memory available: 3.00 MB"
    assert text[1] == f"Parameters: {report.parameters:,}"
    assert text[2].startswith("Expected peak memory: 1.16 MB at batch size 4 (")
    assert text[3] == "✓ Gradient checkpointing: ENABLED (full)"
    assert text[4].startswith(f"Recommended batch size: at most {report.recommended_batch_size} ")
    assert len(text) == 5
    assert report.fits


@pytest.mark.slow
def test_startup_report_of_what_does_not_fit(make_gpt: Callable[..., Any]) -> None:
    report = startup_report(lambda size: lambda: make_gpt(batch=size), 4, memory=50_000)
    text = str(report)
    assert "✗ Gradient checkpointing: DISABLED" in text
    assert "Recommended batch size: none: not even one sample fits" in text
    assert text.endswith("! The expected peak is above the available memory")


def test_tensors_without_memory_do_not_count() -> None:
    """torch.compile leaves fake ones behind, with sizes that are only symbols."""
    gc.collect()
    before = tensor_bytes()
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        fixed = torch.empty(1000, 1000)
        open_sized = torch.empty(shapes.create_unbacked_symint(), 3)
    assert not isinstance(open_sized.shape[0], int)
    assert tensor_bytes() - before < fixed.numel()
