"""Norms of modules, against a plain loop over the gradients below each of them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import gradsight
from gradsight import log_gradient_distribution
from gradsight.measure.groups import GroupNorms, by_block, by_module
from gradsight.measure.norms import combine


class Tied(nn.Module):
    """An embedding that is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wte(x.abs().long() % 7)
        for layer in self.h:
            x = layer(x).tanh()
        return self.head(x)


class TiedBelowOneModule(nn.Module):
    """The same weight twice below one module."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.pair["b"].weight = self.pair["a"].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pair["b"](self.pair["a"](x))


class UsedTwice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


class Unused(nn.Module):
    """A branch that nothing goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.spare = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def nested() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
    return nn.Sequential(nn.ModuleDict({"deep": inner})["deep"], nn.Tanh(), nn.Linear(4, 4))


def frozen() -> nn.Module:
    model = nested()
    model[0][1].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def checkpointed() -> nn.Module:
    model = nested()
    gradsight.apply_checkpointing(model, blocks=["0"])
    return model


def half() -> nn.Module:
    return nested().to(torch.bfloat16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nested": nested,
    "tied": Tied,
    "tied below one module": TiedBelowOneModule,
    "module used twice": UsedTwice,
    "frozen": frozen,
    "unused": Unused,
    "root only": lambda: nn.Linear(4, 4),
    "DataParallel": lambda: nn.DataParallel(nested()),
    "checkpointed": checkpointed,
    "bfloat16": half,
}


class Scalars(dict[str, float]):
    """The least a tracker and a sink must have."""

    def log_scalar(self, name: str, value: float, step: int) -> None:
        assert name not in self, f"{name} was logged twice"
        self[name] = value


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)).sum().backward()


def plain(model: nn.Module) -> dict[str, float]:
    """The twin: a loop over modules, and one over the gradients below each."""
    expected = {}
    inner = model.module if isinstance(model, nn.DataParallel) else model
    for name, module in inner.named_modules(remove_duplicate=False):
        gradients = [each.grad for each in module.parameters() if each.grad is not None]
        if gradients:
            squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
            key = f"gradients/{name}/norm" if name else "gradients/total_norm"
            expected[key] = squares**0.5
    return expected


def module_series(seen: dict[str, float], model: nn.Module) -> dict[str, float]:
    """What was logged of norms, without the parameters' own."""
    inner = model.module if isinstance(model, nn.DataParallel) else model
    own = {f"gradients/{name}/norm" for name, _ in inner.named_parameters()}
    norms = {name: value for name, value in seen.items() if name.endswith("norm")}
    assert own & set(norms)
    return {name: value for name, value in norms.items() if name not in own}


@pytest.mark.parametrize("name", MODELS)
def test_module_norms_are_those_of_the_gradients_below(name: str) -> None:
    model = built(name)
    backward(model)
    tracker = Scalars()
    returned = log_gradient_distribution(model, tracker, 0)
    assert module_series(tracker, model) == pytest.approx(plain(model), rel=1e-5)
    parameters = {f"gradients/{name}/norm": norm for name, norm in returned.items()}
    assert {name: tracker[name] for name in parameters} == parameters


@pytest.mark.parametrize("name", MODELS)
def test_a_watch_sends_the_same_to_its_sinks(name: str) -> None:
    model = built(name)
    sink = Scalars()
    with gradsight.watch(model, sinks=[sink], health=False, recorder=False) as watched:
        backward(model)
        watched.step()
    assert module_series(sink, model) == pytest.approx(plain(model), rel=1e-5)


def test_above_500_parameters_a_watch_sends_blocks_alone() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(126)))
    sink = Scalars()
    with gradsight.watch(model, sinks=[sink], health=False, recorder=False) as watched:
        model(torch.ones(1, 2)).sum().backward()
        watched.step()
    norms = {name for name in sink if name.endswith("/norm")}
    assert norms == {f"gradients/{block}/norm" for block in range(126)}


def test_a_parameter_keeps_a_name_that_a_module_would_have() -> None:
    groups = by_module([("a.b",), ("a.b.c",), ("a.d",)])
    assert groups.of(np.array([1.0, 2.0, 2.0])) == {"a": 3.0}


def test_groups_without_a_gradient_are_left_out() -> None:
    groups = by_module([("a.x",), ("b.x",), ("b.y",)])
    assert groups.of(np.array([5.0]), rows=(2,)) == {"b": 5.0}
    assert by_block(["a.0.x", "b.x"]).of(np.array([5.0]), rows=(0,)) == {"a.0": 5.0}
    assert GroupNorms({}, 3).of(np.array([1.0, 2.0, 3.0])) == {}


@pytest.mark.parametrize(
    "norms",
    [
        [3e200, 4e200, 1.0],
        [3e-200, 4e-200, 0.0],
        [0.0, 0.0, 0.0],
        [np.inf, 1.0, 2.0],
        [np.nan, 1.0, np.inf],
        [1.0, np.nan, 3e200],
    ],
)
def test_odd_norms_are_combined_as_everywhere(norms: list[float]) -> None:
    members = {"all": [0, 1, 2], "two": [0, 1], "last": [2]}
    found = GroupNorms(members, 3).of(np.array(norms))
    for name, rows in members.items():
        expected = float(combine(np.array(norms)[rows]))
        assert found[name] == pytest.approx(expected, rel=1e-14, abs=0, nan_ok=True), name
