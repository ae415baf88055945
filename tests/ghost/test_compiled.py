"""Compiled models stay compiled while they are observed: the same scores, gradients, losses and
random numbers as those of the plain model in two passes, or an eager pass that says so.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ghost.models import build, own_loss, tokens
from ghost.small import SmallGPT, loss_fn, pair, relative_error, small
from gradsight import GhostEngine
from gradsight.ghost.compiled_mode import ATTRIBUTE

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo's own doing


class OwnLoss(SmallGPT):
    """Computes its loss itself."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten())


def inner_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)


def in_half(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(*batch)


def rows(count: int, seed: int) -> dict[str, Tensor]:
    ids = tokens(count, 7, seed=seed)
    return {"input_ids": ids, "labels": ids.clone()}


def hugging_face(name: str) -> nn.Module:
    from transformers.utils import logging

    logging.set_verbosity_error()  # its logger would break the graph
    return build(name).model.train()


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def unfused(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def by_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def by_layers(model: nn.Module) -> nn.Module:
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for layer in layers:
        layer.compile(backend="eager")
    return model


@dataclass(frozen=True)
class Combination:
    make: Callable[[], nn.Module]
    compiled: Callable[[nn.Module], nn.Module]
    mode: str
    loss_fn: Callable[..., Tensor] = loss_fn
    batch: Callable[[int, int], Any] = pair
    options: dict[str, Any] = field(default_factory=dict)
    targets: int = 1
    scaled: bool = False
    adam: bool = False
    within: float = 1e-12


COMBINATIONS = {
    "in place, observed": Combination(small, in_place, "two_pass"),
    "more blocks than graphs are kept": Combination(
        lambda: SmallGPT(blocks=10, width=4).double(), by_blocks, "concat"
    ),
    "loss inside, dropout, targets, by parameter": Combination(
        lambda: OwnLoss(dropout=0.3).double(),
        whole,
        "concat",
        inner_loss,
        options={"per_parameter": True},
        targets=2,
    ),
    "autocast and a scaler": Combination(
        lambda: OwnLoss(dropout=0.2), whole, "concat", in_half, scaled=True, within=2e-2
    ),
    "Adam's scale": Combination(
        small, unfused, "concat", options={"precondition": "adam"}, adam=True, targets=2
    ),
    "Hugging Face, dropout": Combination(
        lambda: hugging_face("gpt2"), by_layers, "concat", own_loss, rows
    ),
    "Hugging Face, observed": Combination(
        lambda: hugging_face("llama"), by_layers, "two_pass", own_loss, rows
    ),
}


@dataclass
class Run:
    losses: list[Tensor] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)


def run(case: Combination, *, compiled: bool) -> Run:
    torch.manual_seed(0)
    model = case.make()
    net = case.compiled(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if case.adam else None
    targets = {str(n): case.batch(3 - n, 50 + n) for n in range(case.targets)}
    mode = case.mode if compiled else "two_pass"
    engine = GhostEngine(
        net, case.loss_fn, targets=targets, mode=mode, optimizer=optimizer, **case.options
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=case.scaled)
    found = Run()
    for step in range(5):
        model.zero_grad()
        torch.manual_seed(100 + step)
        batch = case.batch(4, step)
        if mode == "concat" or not compiled:
            loss = engine.loss(batch)
            scaler.scale(loss / 2).backward()
        else:
            with engine.observe():
                loss = case.loss_fn(net, batch)
                scaler.scale(loss / 2).backward()
        found.losses.append(loss.detach())
        found.scores.append(engine.scores)
        found.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        found.states.append(torch.get_rng_state())
        found.graphs.append(counters["stats"]["unique_graphs"])
        if optimizer is not None:
            optimizer.step()
    engine.close()
    assert not any(hasattr(parameter, ATTRIBUTE) for parameter in model.parameters())
    return found


@pytest.mark.parametrize("name", COMBINATIONS)
def test_compiled_models_stay_compiled(name: str) -> None:
    """After eager first blocks, without a new graph from the fourth step on, and exact."""
    case = COMBINATIONS[name]
    torch._dynamo.reset()
    ours = run(case, compiled=True)
    plain = run(case, compiled=False)
    assert [scores.compiled for scores in ours.scores[2:]] == [True] * 3
    assert not any(scores.compiled for scores in plain.scores)
    assert ours.graphs[3] == ours.graphs[4]
    for step in range(5):
        mine, right = ours.scores[step], plain.scores[step]
        assert mine.mode == case.mode
        assert relative_error(ours.losses[step], plain.losses[step]) < case.within
        assert torch.equal(ours.states[step], plain.states[step])
        for target, values in right.by_target.items():
            assert relative_error(mine.by_target[target], values) < case.within
            for parameter, part in right.by_target_and_parameter.get(target, {}).items():
                found = mine.by_target_and_parameter[target][parameter]
                assert float((found - part).abs().max()) < case.within * float(values.abs().max())
        longest = max(float(value.norm()) for value in plain.gradients[step].values())
        for parameter, value in plain.gradients[step].items():
            found = ours.gradients[step][parameter]
            assert float((found - value).norm()) < case.within * longest, parameter


@pytest.mark.parametrize("mode", ["concat", "two_pass"])
def test_batches_of_another_shape_run_eagerly_once(mode: str) -> None:
    torch._dynamo.reset()
    model, plain, val = small(), small(), pair(3, 2)
    net = unfused(model)
    engine = GhostEngine(net, loss_fn, val, mode=mode)
    reference = GhostEngine(plain, loss_fn, val, mode="two_pass")
    ran = []
    for step, count in enumerate((4, 4, 2, 2, 4)):
        said = pytest.warns(UserWarning, match="eagerly .* because a batch of other shapes")
        with said if step == 2 else nullcontext():
            if mode == "concat":
                engine.loss(pair(count, step)).backward()
            else:
                with engine.observe():
                    loss_fn(net, pair(count, step)).backward()
        reference.loss(pair(count, step)).backward()
        assert relative_error(engine.scores.total, reference.scores.total) < 1e-12
        ran.append(engine.scores.compiled)
    assert ran == [False, True, False, True, True]


class Transposed(nn.Module):
    """Multiplies by what is made of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.exp()


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "exp with a parameter"),
        ({"exact_grad": True}, "exact_grad"),
        ({"_route": "project"}, "route"),
    ],
)
def test_what_cannot_be_compiled_is_observed_eagerly(options: dict[str, Any], reason: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transposed()
    x = torch.randn(7, 3, 5, dtype=torch.float64)
    batch, val = (x[:4], x[:4] + 1), (x[4:], x[4:])
    reference = GhostEngine(model, squared, val, mode="two_pass")
    net = torch.compile(model, backend="eager", fullgraph=True)
    engine = GhostEngine(net, squared, val, mode="two_pass", **options)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(3):
            with engine.observe():
                squared(net, batch).backward()
            assert not engine.scores.compiled
        reference.loss(batch).backward()
    said = [str(each.message) for each in heard if "eager" in str(each.message)]
    assert len(said) == 1
    assert reason in said[0]
    assert relative_error(engine.scores.total, reference.scores.total) < 1e-12
    assert torch.isfinite(squared(net, batch))


def test_a_compiled_forward_is_a_compiled_model() -> None:
    torch._dynamo.reset()
    model = small()
    model.forward = torch.compile(model.forward, backend="eager")
    engine = GhostEngine(model, loss_fn, pair(3, 2))
    for step in range(3):
        engine.loss(pair(4, step)).backward()
    assert engine.scores.compiled
