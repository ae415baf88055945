"""A compiled model is scored eagerly and exactly, with one notice."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ghost.small import loss_fn, pair, relative_error, small
from gradsight import GhostEngine

# Dynamo itself triggers this warning when it compiles a block.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def by_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def forward_alone(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


FIRST_TIER = (("concat", whole), ("two_pass", by_blocks))
CASES = [
    pytest.param(mode, compiled, marks=() if (mode, compiled) in FIRST_TIER else pytest.mark.slow)
    for mode in ("concat", "two_pass")
    for compiled in (whole, in_place, by_blocks, forward_alone)
]


@pytest.mark.parametrize(("mode", "compiled"), CASES)
def test_a_compiled_model_is_scored_exactly_with_one_notice(
    compiled: Callable[[nn.Module], nn.Module], mode: str
) -> None:
    torch._dynamo.reset()
    model, plain, val = small(), small(), pair(3, 2)
    net = compiled(model)
    engine = GhostEngine(net, loss_fn, val, mode=mode)
    reference = GhostEngine(plain, loss_fn, val, mode="two_pass")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, count in enumerate((4, 4, 2)):
            model.zero_grad()
            plain.zero_grad()
            batch = pair(count, step)
            if mode == "concat":
                engine.loss(batch).backward()
            else:
                with engine.observe():
                    loss_fn(net, batch).backward()
            reference.loss(batch).backward()
            assert engine.scores.mode == mode
            assert relative_error(engine.scores.total, reference.scores.total) < 1e-12
            for own, right in zip(model.parameters(), plain.parameters(), strict=True):
                assert relative_error(own.grad, right.grad) < 1e-12
    notices = [str(each.message) for each in caught if "eagerly" in str(each.message)]
    assert notices == [
        "the compiled model runs eagerly while its samples are scored. The scores are exact; only "
        "speed is lost."
    ]
    engine.close()
    assert torch.isfinite(loss_fn(net, pair(4, 9)))
