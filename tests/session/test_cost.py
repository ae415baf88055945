"""What a watch took of the training: recorded, of the right size, and none of it the user's."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gradsight import open_run, watch
from gradsight.core import guard
from gradsight.core.guard import Guard


def train(run_dir: Path, steps: int, width: int = 4, **options: object) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, run_dir=run_dir, quiet=True, **options):  # type: ignore[arg-type]
        for _ in range(steps):
            model(torch.randn(8, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_run_tells_what_it_cost(tmp_path: Path) -> None:
    train(tmp_path, 30)
    cost = open_run(tmp_path).cost()
    assert cost is not None
    assert cost.steps == 29, "the first step is where counting begins"
    assert 0 < cost.seconds_per_step < 1


def test_a_run_of_before_has_none(tmp_path: Path) -> None:
    train(tmp_path, 1)
    assert open_run(tmp_path).cost() is None


def test_time_inside_the_border_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep it is entered; a clock by hand says exactly how long."""
    now = [0.0]
    monkeypatch.setattr(guard, "perf_counter", lambda: now[0])
    monkeypatch.setattr(guard, "spent", {})
    inner = Guard(None, "inner", "inner")
    outer = Guard(None, "outer", "outer")

    def wait(seconds: float) -> None:
        now[0] += seconds

    def nested() -> None:
        wait(1.0)
        inner.run(wait, 2.0)
        inner.run(wait, 4.0)

    def fail() -> None:
        wait(16.0)
        raise ValueError("planted")

    outer.run(nested)
    now[0] += 100.0  # the user's own time
    outer.run(wait, 8.0)
    outer.run(fail)
    assert list(guard.spent.values()) == [31.0]
    assert math.isclose(now[0], 131.0)
