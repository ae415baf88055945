"""Mixed precision, loss scaling, activation checkpointing and compilation: the same scores, or an
error, never wrong ones.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghost.models import build
from ghost.small import direction_of, loss_fn, pair, relative_error, small, truth
from ghost.test_table import gradient, observe
from gradsight import GhostEngine, GradsightError

BF16 = 5e-2
"""Products are rounded to 8 bits of mantissa on their way, per-sample sums are kept in fp32."""


@pytest.mark.parametrize("exact_grad", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool, exact_grad: bool) -> None:
    """Scores as close to fp64's as bf16 allows, .grad as close to plain autocast training's."""
    model, batch, val = small(dtype=torch.float32), pair(4, 1), pair(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        plain_loss = loss_fn(model, batch)
    plain_loss.backward()
    plain = gradient(model)
    model.zero_grad()
    engine = GhostEngine(model, loss_fn, val, exact_grad=exact_grad)
    if inside:
        with engine.observe():
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model, batch)
            loss.backward()
    else:
        with torch.autocast("cpu", torch.bfloat16), engine.observe():
            loss = loss_fn(model, batch)
            loss.backward()
    assert torch.equal(loss, plain_loss)
    reference = small()
    assert (
        relative_error(engine.scores.total, truth(reference, batch, direction_of(reference, val)))
        < BF16
    )
    for name, parameter in model.named_parameters():
        if exact_grad:
            assert torch.equal(parameter.grad, plain[name]), name
        else:
            assert float((parameter.grad - plain[name]).norm() / plain[name].norm()) < 1e-2, name


@pytest.mark.parametrize("name", ["gpt2", "llama", "convnet", "transformer", "mlp", "lora"])
def test_bf16_weights(name: str) -> None:
    case = build(name, torch.bfloat16)
    case.model.eval()
    engine, _ = observe(case)
    assert engine.scores.total.dtype == torch.float32
    reference = build(name)
    for p, q in zip(reference.model.parameters(), case.model.parameters(), strict=True):
        p.data = q.data.double()
    reference.model.eval()
    exact, _ = observe(reference)
    assert relative_error(engine.scores.total, exact.scores.total) < BF16


@pytest.mark.parametrize("scale", [1.0, 2.0**14])
def test_grad_scaler(scale: float) -> None:
    """The loss scale is divided out of the scores, and clipping is told apart from unscaling."""
    model, batch, val = small(), pair(4, 1), pair(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    engine = GhostEngine(model, loss_fn, val, optimizer=optimizer)
    expected = truth(model, batch, direction_of(model, val))
    with engine.observe():
        scaler.scale(loss_fn(model, batch)).backward()
    assert relative_error(engine.scores.total, expected) < 1e-9
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    (block,) = engine._log.pending.blocks
    assert abs(block.clip.read() * float(norm) / 0.01 - 1) < 1e-4
    assert torch.amp.GradScaler.scale.__qualname__ == "GradScaler.scale"


def test_checkpointed_blocks_give_the_same_gradient_and_scores() -> None:
    batch, val = pair(4, 1), pair(3, 2)
    found = []
    for checkpointed in (False, True):
        model = small(0.2, torch.float32)
        if checkpointed:
            for block in model.blocks:
                inner = block.forward
                block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        torch.manual_seed(3)
        engine = GhostEngine(model, loss_fn, val)
        with engine.observe():
            loss_fn(model, batch).backward()
        found.append((engine.scores.total, gradient(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.parametrize("self_check", [False, True])
def test_reentrant_checkpointing_is_refused(self_check: bool) -> None:
    """By torch itself, in the target's pass: no gradient can be pulled through it."""
    model = small(0.0, torch.float32)
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=True)
    engine = GhostEngine(model, loss_fn, pair(3, 2), self_check=self_check)
    with pytest.raises(GradsightError, match="set use_reentrant=False"), engine.observe():
        loss_fn(model, pair(4, 1)).backward()


def test_modules_get_hooks_only_where_a_backward_pass_may_run_them_again() -> None:
    """Hooks on every module cost more than all of the engine's other work in a forward pass."""
    counts = []
    for checkpointed in (False, True):
        model = small(0.0, torch.float32)
        if checkpointed:
            inner = model.blocks[0].forward
            model.blocks[0].forward = lambda x, inner=inner: checkpoint(
                inner, x, use_reentrant=False
            )
        engine = GhostEngine(model, loss_fn, pair(3, 2))
        with engine.observe():
            loss = loss_fn(model, pair(4, 1))
            counts.append(sum(len(m._forward_pre_hooks) for m in model.blocks.modules()))
            loss.backward()
    assert counts[0] == 0
    assert counts[1] > 0


def test_hugging_face_gradient_checkpointing() -> None:
    found = []
    for checkpointed in (False, True):
        case = build("llama")
        case.model.train()
        if checkpointed:
            case.model.gradient_checkpointing_enable({"use_reentrant": False})
        engine, _ = observe(case)
        found.append(engine.scores.total)
    assert relative_error(found[1], found[0]) < 1e-12


class NarrowInside(nn.Module):
    """In float64, but for a norm that computes in float32, as many RMSNorms do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        narrow = hidden.to(torch.float32)
        normed = narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + 1e-6)
        return self.second(self.scale * normed.to(hidden.dtype))


@pytest.mark.parametrize("mode", ["two_pass", "concat"])
def test_the_narrowest_type_decides_what_is_rounding(mode: str) -> None:
    torch.manual_seed(0)
    model = NarrowInside().double()
    x = torch.randn(7, 6, dtype=torch.float64)
    y = torch.arange(7) % 3

    def function(m: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(m(batch[0]), batch[1])

    engine = GhostEngine(model, function, (x[4:], y[4:]), mode=mode)
    engine.loss((x[:4], y[:4])).backward()
    assert engine.scores.mode == mode
    report = engine.verify((x[:4], y[:4]))
    assert report.tolerance == 1e-5
    assert report.passed
