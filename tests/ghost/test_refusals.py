"""Bad input and models that cannot be scored: each a clear error, after which training goes on
without the engine.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import warm
from ghost.small import loss_fn, pair, small
from gradsight import GhostEngine, GradsightError
from gradsight.errors import GradsightWarning


def refused(text: str, *args: object, **options: object) -> None:
    with pytest.raises(GradsightError, match=text):
        GhostEngine(*args, **options)


def test_arguments() -> None:
    model, val = small(), pair(3, 2)
    refused("exactly one of val_data .* and targets", model, loss_fn)
    refused("exactly one of val_data .* and targets", model, loss_fn, val, targets={"a": val})
    refused(
        "mode must be 'auto' or 'concat' or 'two_pass', got 'three_pass'",
        model,
        loss_fn,
        val,
        mode="three_pass",
    )
    refused(
        "refresh_every must be a whole number of 1 or more", model, loss_fn, val, refresh_every=0
    )
    refused(
        "precondition must be None or 'adam', got 'sgd'", model, loss_fn, val, precondition="sgd"
    )
    refused("precondition='adam' needs the optimizer", model, loss_fn, val, precondition="adam")
    refused("targets is empty", model, loss_fn, targets={})
    refused(
        "the validation data of target 'validation' is empty", model, loss_fn, pair(3, 2)[0][:0]
    )
    refused("the validation data of target 'a' is empty", model, loss_fn, targets={"a": ()})
    meta = tuple(t.to("meta") for t in val)
    refused(
        r"target 'validation' is on meta, the model on cpu\. "
        r"Move it there first: batch\.to\('cpu'\)",
        model,
        loss_fn,
        meta,
    )
    refused("the model has no trainable parameter", small().requires_grad_(False), loss_fn, val)


def goes_on(model: nn.Module) -> None:
    """A plain training pass works, and sees nothing of the engine."""
    model.zero_grad()
    loss_fn(model, pair(4, 1)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not nn.modules.module._global_forward_hooks


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            "expected 3 samples in the tensors that the model was called with, got the shapes",
            {"sample_ids": [1, 2, 3]},
        ),
        ("expected one domain per sample: 4 samples, got 2 domains", {"domains": ["a", "b"]}),
    ],
)
def test_wrong_numbers(text: str, options: dict[str, list[object]]) -> None:
    model = small()
    engine = GhostEngine(model, loss_fn, pair(3, 2))
    with pytest.raises(GradsightError, match=text), engine.observe(**options):
        loss_fn(model, pair(4, 1)).backward()
    goes_on(model)


def backward_twice(model: nn.Module) -> None:
    loss = loss_fn(model, pair(4, 1))
    loss.backward(retain_graph=True)
    loss.backward()


def test_blocks_without_exactly_one_backward() -> None:
    model = small()
    engine = GhostEngine(model, loss_fn, pair(3, 2))
    with (
        pytest.raises(GradsightError, match=r"observe\(\) ended without a call of the model"),
        engine.observe(),
    ):
        pass
    with (
        pytest.raises(
            GradsightError, match=r"observe\(\) ended without a backward pass: expected exactly one"
        ),
        engine.observe(),
    ):
        loss_fn(model, pair(4, 1))
    with (
        pytest.raises(GradsightError, match=r"observe\(\) ended after 2 backward passes"),
        engine.observe(),
    ):
        backward_twice(model)
    with (
        pytest.raises(GradsightError, match="blocks cannot be nested"),
        engine.observe(),
        engine.observe(),
    ):
        pass
    with pytest.raises(GradsightError, match="there are no scores yet"):
        _ = engine.scores
    engine.close()
    with pytest.raises(GradsightError, match="this GhostEngine is closed"), engine.observe():
        pass
    goes_on(model)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Identity()])
def test_second_derivatives(activation: nn.Module) -> None:
    """A gradient penalty; without an activation its term would else be lost in silence."""
    model = nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 1))
    x = torch.randn(4, 40, 3, requires_grad=True)
    engine = GhostEngine(
        model, lambda m, batch: m(batch).mean(), torch.randn(2, 40, 3), self_check=False
    )
    with (
        pytest.raises(GradsightError, match="differentiated with create_graph=True"),
        engine.observe(),
    ):
        loss = model(x).mean()
        penalty = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        (loss + penalty).backward()
    loss = model(x).mean()
    torch.autograd.grad(loss, x, create_graph=True)[0].square().sum().backward()
    assert model[0].weight.grad is not None


def test_nan_in_the_direction() -> None:
    model = small()
    val = pair(3, 2)

    def bad(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(m, batch) * (float("nan") if batch is val else 1.0)

    engine = GhostEngine(model, bad, val)
    with (
        pytest.raises(
            GradsightError,
            match=r"the gradient of target 'validation' holds NaN or Inf \(in embed.weight",
        ),
        engine.observe(),
    ):
        pass
    goes_on(model)


def test_a_loss_that_is_no_scalar() -> None:
    engine = GhostEngine(small(), lambda m, b: m(b[0]), pair(3, 2))
    with (
        pytest.raises(
            GradsightError,
            match=r"must return a scalar mean loss, on target 'validation' it returned "
            r"a tensor of shape",
        ),
        engine.observe(),
    ):
        pass


def images(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(rows)), torch.arange(
        rows
    ) % 2


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class OwnBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(108, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.batch_norm(x.flatten(1), None, None, training=True))


class Standardised(nn.Module):
    """Statistics over the batch, written by hand: only the self-check can find that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(108, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.flatten(1))
        return y - y.mean(0)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: object, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(108, 2, generator=torch.Generator().manual_seed(1)) / 10
        )
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Hidden.apply(x.flatten(1), self.weight))


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("1 is a BatchNorm2d in training mode: its statistics mix the samples",
         lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))),
        ("batch_norm is called with training=True", OwnBatchNorm),
        ("sample 0 alone gives another output than in the batch: samples are not independent",
         Standardised),
    ],
)  # fmt: skip
def test_models_without_gradients_of_single_samples(text: str, build: type[nn.Module]) -> None:
    model = build()
    if isinstance(model, OwnBatchNorm):
        engine = GhostEngine(model, cross_entropy, images(3), self_check=False)
    else:
        engine = GhostEngine(model, cross_entropy, images(3))
    with pytest.raises(GradsightError, match=text), engine.observe():
        cross_entropy(model, images(4)).backward()
    cross_entropy(model, images(4)).backward()


def test_a_custom_function_is_scored_by_a_pass_for_each_sample() -> None:
    torch.manual_seed(0)
    model = CustomFunction()
    batch, validation = images(4), images(3)
    direction = torch.autograd.grad(cross_entropy(model, validation), list(model.parameters()))
    engine = GhostEngine(model, cross_entropy, validation)
    with (
        pytest.warns(
            GradsightWarning,
            match=r"one backward pass each.*fast scores of 1 of 3 parameters are wrong",
        ),
        engine.observe(),
    ):
        cross_entropy(model, batch).backward()
    for i in range(4):
        one = batch[0][i : i + 1], batch[1][i : i + 1]
        own = torch.autograd.grad(cross_entropy(model, one) / 4, list(model.parameters()))
        expected = sum(float((d * g).sum()) for d, g in zip(direction, own, strict=True))
        assert float(engine.scores.total[i]) == pytest.approx(expected, rel=1e-5)


def test_batch_norm_in_evaluation_mode_is_fine() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)
    ).double()
    model[1].eval()
    engine = GhostEngine(model, cross_entropy, (images(3)[0].double(), images(3)[1]))
    batch = images(4)[0].double(), images(4)[1]
    with engine.observe():
        cross_entropy(model, batch).backward()
    assert engine.verify(batch).passed


def test_a_contrastive_loss() -> None:
    model = small()

    def contrastive(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = F.normalize(m(batch[0]).mean(1), dim=-1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    engine = GhostEngine(model, contrastive, pair(3, 2))
    with (
        pytest.raises(
            GradsightError,
            match="the loss mixes samples: the gradient at one sample's output depends on another",
        ),
        engine.observe(),
    ):
        contrastive(model, pair(4, 1)).backward()
    goes_on(model)


def test_a_regulariser_in_the_loss() -> None:
    model = small()
    engine = GhostEngine(model, loss_fn, pair(3, 2))
    with (
        pytest.raises(GradsightError, match="belongs to no sample"),
        engine.observe(),
    ):
        (loss_fn(model, pair(4, 1)) + sum(p.square().sum() for p in model.parameters())).backward()


def test_a_model_without_tensors() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, number: int) -> Tensor:
            return self.weight * number

    model = Constant()
    engine = GhostEngine(model, lambda m, b: m(2).mean(), torch.ones(1))
    with (
        pytest.raises(
            GradsightError,
            match="the size of the batch cannot be told: Constant was called without a tensor",
        ),
        engine.observe(),
    ):
        model(2).mean().backward()


class TrainingOnly(nn.Module):
    """Another layer in training than in evaluation, with the samples where shapes do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = self.first(x.transpose(0, 1)).transpose(0, 1)
        return self.second(x).mean(1)


def test_a_use_that_only_training_has() -> None:
    torch.manual_seed(0)
    model = TrainingOnly().double()
    batch = torch.randn(4, 4, 5, dtype=torch.float64), torch.arange(4) % 2
    engine = GhostEngine(model, cross_entropy, batch)
    with (
        pytest.warns(
            GradsightWarning, match=r"training uses first\.bias and first\.weight differently"
        ),
        engine.observe(),
    ):
        cross_entropy(model, batch).backward()
    model.eval()
    direction = torch.autograd.grad(
        cross_entropy(model, batch), list(model.parameters()), allow_unused=True
    )
    model.train()
    for i in range(4):
        one = batch[0][i : i + 1], batch[1][i : i + 1]
        own = torch.autograd.grad(cross_entropy(model, one) / 4, list(model.parameters()))
        pairs = zip(direction, own, strict=True)
        expected = sum(float((d * g).sum()) for d, g in pairs if d is not None)
        assert float(engine.scores.total[i]) == pytest.approx(expected, rel=1e-9)


def test_a_model_that_is_not_called_itself() -> None:
    model = small()
    engine = GhostEngine(model, loss_fn, pair(3, 2))
    ids, labels = pair(4, 1)
    with (
        pytest.raises(GradsightError, match=r"SmallGPT\) was not called.*calls parts of the model"),
        engine.observe(sample_ids=range(4)),
    ):
        F.cross_entropy(model.head(model.embed(ids)).flatten(0, 1), labels.flatten()).backward()


def test_lengths_that_equal_the_batch_size_later() -> None:
    """Layouts are learnt from the first batch, so a later batch as long as it is large does not
    mislead.
    """
    torch.manual_seed(0)
    model = nn.LSTM(5, 3).double()

    def last(m: nn.Module, x: Tensor) -> Tensor:
        return m(x)[0].square().mean()

    engine = GhostEngine(model, last, torch.randn(6, 2, 5, dtype=torch.float64), batch_dim=1)
    with pytest.warns(UserWarning, match="no fast rule for lstm"), engine.observe():
        last(model, torch.randn(7, 4, 5, dtype=torch.float64)).backward()
    square = torch.randn(4, 4, 5, dtype=torch.float64)
    with engine.observe():
        last(model, square).backward()
    assert engine.verify(square).max_relative_error < 1e-9


def test_a_model_may_catch_the_error_of_an_operation() -> None:
    """The error is the model's: it comes out unchanged, and the block goes on."""
    caught: list[Exception] = []

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            for other in (torch.ones(7), torch.ones(3)):
                try:
                    x = x + other
                except RuntimeError as error:
                    caught.append(error)
            try:
                self.layer.weight.add_(1)
            except RuntimeError as error:
                caught.append(error)
            return self.layer(x)

    torch.manual_seed(0)
    model = Tries()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    engine = GhostEngine(model, loss_fn, torch.ones(2, 3))
    with engine.observe():
        before = len(caught)
        loss_fn(model, torch.randn(4, 3)).backward()
    assert len(caught) > before
    assert not any(isinstance(error, GradsightError) for error in caught)
    assert len(engine.scores.total) == 4
    engine.close()


AFTER_A_MISTAKE = """
from unittest import mock
import pytest
import torch
from torch.nn import functional as F
from gradsight import GhostEngine, GradsightError


def fail(*args):
    raise RuntimeError("a mistake of Gradsight")


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


model = torch.nn.Linear(4, 3)
batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
first = GhostEngine(model, loss_fn, batch)
with mock.patch("gradsight.core.passes.Passes.begin", fail):
    first.loss(batch).backward()
second = GhostEngine(model, loss_fn, batch)
for engine in (first, second):
    with pytest.raises(GradsightError, match="Close every engine"):
        engine.loss(batch)
    with pytest.raises(GradsightError, match="Close every engine"), engine.observe():
        loss_fn(model, batch).backward()
    engine.close()
third = GhostEngine(model, loss_fn, batch)
third.loss(batch).backward()
assert third.scores.total.shape == (4,)
third.close()
"""


@pytest.mark.internal
def test_no_engine_is_silent_after_an_internal_error(tmp_path: Path) -> None:
    """In a process of its own, in which no other engine or watch is open."""
    script = tmp_path / "script.py"
    script.write_text(AFTER_A_MISTAKE, encoding="utf-8")
    done = warm.run([script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "which gradients are written" in done.stderr
