"""Norms by expert: which parameters hold experts, and that the record has what a loop finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsight
from gradsight.core.experts import expert_groups
from gradsight.core.parameters import named_parameters
from gradsight.measure.experts import ExpertReading, exact_expert_norms


def groups(model: nn.Module) -> dict[str, int]:
    found = expert_groups(model, named_parameters(model))
    return {group.name: group.size for group in found}


class Holder(nn.Module):
    """A module with parameters of these shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class GroupedExperts(Holder):
    num_experts = 4


def inside(name: str, module: nn.Module, **others: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({name: module, **others})])})


def counted() -> nn.Module:
    """Experts by name, and a tensor beside them that is none by its number."""
    module = Holder(w1=(4, 3, 2), per_head=(2, 3, 2))
    module.num_experts = 4  # type: ignore[assignment]
    return inside("experts", module)


def conv_experts() -> nn.Module:
    return inside("experts", nn.ModuleList(nn.Conv1d(2, 3, 3) for _ in range(2)))


def shared() -> nn.Module:
    expert = nn.Linear(3, 3)
    return inside("experts", nn.ModuleList([expert, expert]))


HELD: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "by the path": (
        lambda: inside("experts", Holder(w1=(4, 3, 2), bias=(4, 2))),
        {"layers.0.experts.w1": 4, "layers.0.experts.bias": 4},
    ),
    "by the class": (
        lambda: inside("mlp", GroupedExperts(w1=(4, 3, 2))),
        {"layers.0.mlp.w1": 4},
    ),
    "by a router beside": (
        lambda: inside("ffn", Holder(w1=(4, 3, 2)), router=nn.Linear(3, 4)),
        {"layers.0.ffn.w1": 4},
    ),
    "by a router of its own": (
        lambda: inside("ffn", Holder(w1=(4, 3, 2), gate=(3, 4))),
        {"layers.0.ffn.w1": 4},
    ),
    "by their number": (counted, {"layers.0.experts.w1": 4}),
    "a list": (
        lambda: inside("experts", nn.ModuleList(nn.Linear(3, 3) for _ in range(3))),
        {"layers.0.experts": 3},
    ),
    "a list beside a router": (
        lambda: inside(
            "nets", nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), gate=nn.Linear(3, 3)
        ),
        {"layers.0.nets": 3},
    ),
    "convolutions as experts": (conv_experts, {"layers.0.experts": 2}),
}
NOT_HELD: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: inside("experts_conv", nn.Conv1d(4, 3, 3)),
    "one matrix per head": lambda: inside("attention", Holder(query=(4, 8, 2))),
    "bilinear": lambda: nn.Sequential(nn.Bilinear(3, 4, 5)),
    "positions": lambda: inside("experts", Holder(positions=(1, 16, 4))),
    "a kernel inside of an expert": lambda: inside("experts", nn.ModuleList([Holder(kernel=(4, 3, 3))])),
    "layers": lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
    "a list of layers": lambda: inside("blocks", nn.ModuleList(nn.Linear(3, 3) for _ in range(3))),
    "experts that share weights": shared,
    "unlike modules": lambda: inside("experts", nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 4)])),
}  # fmt: skip


@pytest.mark.parametrize("case", HELD)
def test_experts_are_known(case: str) -> None:
    make, expected = HELD[case]
    assert groups(make()) == expected


@pytest.mark.parametrize("case", NOT_HELD)
def test_what_only_looks_like_experts(case: str) -> None:
    assert groups(NOT_HELD[case]()) == {}


@pytest.mark.parametrize(
    "gradient",
    [
        lambda: torch.randn(5, 6, 7),
        lambda: torch.randn(5, 6, 7, dtype=torch.float64),
        lambda: torch.randn(5, 6, 7).bfloat16(),
        lambda: torch.randn(7, 6, 5).permute(2, 1, 0),
        lambda: torch.randn(5, 6, 7) * torch.tensor([0, 1e-30, 1e30, 1, 1e-40])[:, None, None],
        lambda: torch.randn(3, 4),
    ],
    ids=["plain", "double", "bfloat16", "transposed", "awkward", "biases"],
)
def test_norms_by_expert_equal_the_loop(gradient: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    values = gradient()
    found = ExpertReading.of({3: values}).read()
    np.testing.assert_allclose(found[3], exact_expert_norms(values), rtol=5e-6)


def test_several_tensors_are_told_apart() -> None:
    first, second = torch.randn(2, 3, 3), torch.randn(4, 3)
    found = ExpertReading.of({7: first, 2: second}).read()
    np.testing.assert_allclose(found[7], exact_expert_norms(first), rtol=5e-6)
    np.testing.assert_allclose(found[2], exact_expert_norms(second), rtol=5e-6)


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            **changes,
        )
    )


def test_the_record_has_every_expert_of_mixtral(tmp_path: Path) -> None:
    model = mixtral()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    expected: list[dict[str, list[float]]] = []
    looks = gradsight.Schedule(step_interval=2)
    with gradsight.watch(
        model, optimizer, run_dir=tmp_path, histograms=looks, sinks=["tensorboard"]
    ):
        for step in range(4):
            ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(model(input_ids=ids, labels=ids).loss).backward()
            scaler.unscale_(optimizer)
            if step % 2 == 0:
                named = dict(model.named_parameters())
                expected.append(
                    {
                        name: [float(expert.norm()) for expert in tensor.grad.double()]
                        for name, tensor in named.items()
                        if ".experts." in name and tensor.grad is not None
                    }
                )
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    run = gradsight.open_run(tmp_path)
    stats = list(run.expert_stats())
    assert [stat.step for stat in stats[::8]] == [0, 2]
    assert {stat.group for stat in stats} == set(expected[0])
    assert len(expected[0]) == 2
    for stat in stats:
        exact = expected[stat.step // 2][stat.group][stat.expert]
        assert stat.l2 == pytest.approx(exact, rel=1e-5)
    table = run.to_arrow("expert_stats")
    assert table.num_rows == len(stats) == 2 * 2 * 4
    assert table.column_names == ["step", "group", "expert", "l2"]
    # Together they make up the parameter's own norm.
    for parameter in run.parameter_stats("model.layers.0.mlp.experts.down_proj"):
        own = [
            each.l2
            for each in stats
            if (each.step, each.group) == (parameter.step, parameter.parameter)
        ]
        if own:
            assert np.linalg.norm(own) == pytest.approx(parameter.l2, rel=1e-5)


def test_a_run_without_experts_has_no_table_of_them(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradsight.watch(model, optimizer, run_dir=tmp_path):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    import sqlite3

    tables = sqlite3.connect(tmp_path / "run.sqlite").execute("SELECT name FROM sqlite_master")
    assert ("experts",) not in set(tables)
    assert list(gradsight.open_run(tmp_path).expert_stats()) == []
