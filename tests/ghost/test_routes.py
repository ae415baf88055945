"""The routes of a linear layer give the same scores, and the cost rule picks the cheap one."""

import pytest
import torch
from torch import nn

from ghost.models import build
from ghost.small import relative_error
from ghost.test_table import observe, plain_scores
from gradsight import GhostEngine
from gradsight.ghost import scratch
from gradsight.ghost.routes import balance_of, choose


@pytest.mark.parametrize("route", ["materialise", "project", None])
@pytest.mark.parametrize("name", ["mlp", "transformer_time_first", "qwen2", "oddities", "convnet"])
def test_every_route_is_exact(name: str, route: str | None) -> None:
    case = build(name)
    expected = plain_scores(case)
    engine, _ = observe(case, _route=route)
    assert relative_error(engine.scores.total, expected) < 1e-9


@pytest.mark.parametrize("fitting", [0, 1, 2, 3, 100])
def test_products_are_made_for_as_many_samples_as_fit(
    fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five samples in groups of one, two, three or five, on layers of different size that share the
    memory.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    monkeypatch.setattr(scratch, "ON_CPU", fitting * 6 * 8 * 8)
    x, v = torch.randn(5, 7, 6, dtype=torch.float64), torch.randn(3, 7, 6, dtype=torch.float64)

    def loss_fn(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).square().mean()

    loss_fn(model, x).backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    engine = GhostEngine(model, loss_fn, v, self_check=False, _route="materialise")
    for _ in range(2):
        model.zero_grad()
        with engine.observe():
            loss_fn(model, x).backward()
        for parameter, grad in zip(model.parameters(), plain, strict=True):
            assert torch.allclose(parameter.grad, grad, rtol=1e-12, atol=1e-15)
    assert engine.verify(x).max_relative_error < 1e-12


def test_scratch_memory_is_shared_by_layers_but_not_by_devices_or_types() -> None:
    memory = scratch.Scratch()
    room = memory.take(torch.empty(1), 4, 8, 6)
    smaller, twice = memory.take(torch.empty(1), 4, 3, 6), memory.take(torch.empty(1), 4, 8, 6)
    assert (
        room.matrices.data_ptr()
        == room.rows.data_ptr()
        == smaller.rows.data_ptr()
        == twice.rows.data_ptr()
    )
    assert memory.take(torch.empty(1, dtype=torch.float64), 4, 8, 6).rows.dtype == torch.float64
    assert memory.take(torch.empty(1, device="meta"), 4, 8, 6).rows.device.type == "meta"
    larger = memory.take(torch.empty(1), 5, 8, 6)
    assert memory.take(torch.empty(1), 4, 8, 6).rows.data_ptr() == larger.rows.data_ptr()


def test_the_rule() -> None:
    assert choose(256, 384, 1536) == "materialise"
    assert choose(16, 384, 1536) == "project"
    assert choose(64, 512, 512, directions=8) == "materialise"


def test_an_accelerator_moves_fewer_entries_per_product_than_a_core() -> None:
    single, half = balance_of("cuda", torch.float32), balance_of("cuda", torch.bfloat16)
    assert balance_of("cpu", torch.bfloat16) < single < half
    assert choose(256, 384, 1536, balance=single) == "materialise"
    assert choose(256, 384, 1536, balance=half) == "project"
    assert choose(2048, 384, 1536, balance=half) == "materialise"
