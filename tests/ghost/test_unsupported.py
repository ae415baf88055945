"""Models without a fast rule: scored exactly by a slower way, or rejected by a GradsightError.

In each case `.grad` is that of training without the engine.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsight import GhostEngine, GradsightError
from gradsight.errors import GradsightWarning
from gradsight.ghost.blocks import BlockScorer

Pair = tuple[Tensor, Tensor]
LossFn = Callable[[nn.Module, Any], Tensor]


@pytest.fixture(autouse=True)
def _notices_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradsightWarning)
        yield


def mse(model: nn.Module, batch: Pair) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def gradient(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: g.to_dense() for n, g in zip(named, found, strict=True) if g is not None}


def inner(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    """The real inner product: a complex number counts as two real ones."""
    return sum((a[n].conj() * b[n]).real.double().sum() for n in a if n in b)


def truth(model: nn.Module, batch: Pair, validation: Pair, loss_fn: LossFn = mse) -> Tensor:
    model.eval()
    direction = gradient(model, loss_fn(model, validation))
    model.train()
    size = len(batch[0])
    rows = [(batch[0][i : i + 1], batch[1][i : i + 1]) for i in range(size)]
    return torch.stack([inner(direction, gradient(model, loss_fn(model, r) / size)) for r in rows])


def run(engine: GhostEngine, model: nn.Module, batch: Any, loss_fn: LossFn, how: str) -> None:
    model.zero_grad()
    if how == "loss":
        engine.loss(batch).backward()
        return
    with engine.observe():
        loss_fn(model, batch).backward()


def check(model: nn.Module, batch: Pair, validation: Pair, how: str, rounding: float) -> None:
    """Scores against a loop over samples, `.grad` against autograd, three steps of training."""
    plain = gradient(model, mse(model, batch))
    expected = truth(model, batch, validation)
    engine = GhostEngine(model, mse, validation)
    for _ in range(3):
        run(engine, model, batch, mse, how)
        off = (engine.scores.total.double() - expected).abs().max() / expected.abs().max()
        assert float(off) < rounding
        for name, parameter in model.named_parameters():
            own = plain[name]
            assert parameter.grad is not None
            distance = (parameter.grad.to_dense() - own).norm()
            assert float(distance) <= rounding * float(own.norm()), name
    assert engine.verify(batch).passed


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, with a complex weight whose gradient is small."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.skip, self.head = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 1, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, 7, dtype=torch.cfloat))
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bix,iox->box", torch.fft.rfft(x), self.weight)
        return self.head(self.skip(x) + self.share * torch.fft.irfft(modes, n=12))


@pytest.mark.parametrize("how", ["loss", "observe"])
@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_complex_parameters(share: float, how: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 4, 12), torch.randn(8, 1, 12)
    check(Spectral(share), (x[:5], y[:5]), (x[5:], y[5:]), how, 2e-6)


@pytest.mark.parametrize("how", ["loss", "observe"])
def test_sparse_embeddings(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 1))
    x, y = torch.randint(50, (8, 3)), torch.randn(8, 1)
    check(model, (x[:5], y[:5]), (x[5:], y[5:]), how, 2e-6)
    assert model[0].weight.grad.is_sparse


class Bags(nn.Module):
    """Ids of all samples in one list, and where each sample begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 8, sparse=True, mode="sum")
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.table(ids, offsets))


@pytest.mark.parametrize("how", ["loss", "observe"])
def test_samples_that_only_offsets_tell_apart_are_refused(how: str) -> None:
    torch.manual_seed(0)
    model = Bags()

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(m(batch[0], batch[1]), batch[2])

    def batch(starts: list[int], size: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randint(50, (size,)), torch.tensor(starts), torch.randn(len(starts), 1)

    engine = GhostEngine(model, loss_fn, batch([0, 2, 4], 6))
    with pytest.raises(GradsightError, match="cannot be scored: Bags fails on one sample"):
        run(engine, model, batch([0, 2, 4, 7, 8], 9), loss_fn, how)
    assert model.head.weight.grad is None


class ScaledByLargest(nn.Module):
    """Every row is scaled by the largest entry of the whole batch, a little."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden * (1 + self.share * x.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_depend_on_each_other_a_little_do_not_share_a_pass(dtype: torch.dtype) -> None:
    """Below what counts as rounding in the scores, but above what is promised of the gradient."""
    torch.manual_seed(0)
    model = ScaledByLargest(1e-5 if dtype == torch.float32 else 1e-10).to(dtype)
    x, y = torch.randn(8, 4, dtype=dtype), torch.randn(8, 1, dtype=dtype)
    x[7] = 5.0  # the largest entry is a validation row's
    batch, validation = (x[:5], y[:5]), (x[5:], y[5:])
    plain = gradient(model, mse(model, batch))
    engine = GhostEngine(model, mse, validation)
    run(engine, model, batch, mse, "loss")
    assert engine.scores.mode == "two_pass"
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - plain[name]).norm()) <= 1e-6 * float(plain[name].norm())
    with pytest.raises(GradsightError, match="the gradient of the training rows alone"):
        GhostEngine(model, mse, validation, mode="concat").loss(batch)


class DrawsFromNumpy(nn.Module):
    """Other blocks in training than in evaluation, from a generator that every call seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            np.random.seed(524287)
            x = x + 1e-3 * float(np.random.random())
        return self.body(x)


def test_random_numbers_of_numpy_are_not_drawn_for_validation_rows() -> None:
    torch.manual_seed(0)
    model = DrawsFromNumpy()
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    batch, validation = (x[:5], y[:5]), (x[5:], y[5:])
    expected = truth(model, batch, validation)
    state = np.random.get_state()[1].tolist()
    engine = GhostEngine(model, mse, validation)
    run(engine, model, batch, mse, "loss")
    assert engine.scores.mode == "two_pass"
    off = (engine.scores.total - expected).abs().max() / expected.abs().max()
    assert float(off) < 1e-5
    assert np.random.get_state()[1].tolist() == state


class TrainsOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
        ctx.training = training
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.training, "make sure to use `model.train()`"
        return grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return TrainsOnly.apply(self.body(x), self.training)


@pytest.mark.parametrize("how", ["loss", "observe"])
def test_a_model_that_cannot_go_backward_in_evaluation_mode(how: str) -> None:
    model = Reversible()
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    engine = GhostEngine(model, mse, (x[5:], y[5:]))
    with pytest.raises(
        GradsightError, match="evaluation mode, and Reversible may not support backward there"
    ):
        run(engine, model, (x[:5], y[:5]), mse, how)


class Detector(nn.Module):
    """Labels as a list with a dict for each sample, as detection models take them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]]) -> Pair:
        boxes = self.body(x)
        off = [(boxes[i] - each["boxes"]).square().mean() for i, each in enumerate(labels)]
        return torch.stack(off).mean(), boxes


@pytest.mark.parametrize("how", ["loss", "observe"])
def test_labels_as_a_list_of_dicts_are_named_in_the_error(how: str) -> None:
    torch.manual_seed(0)
    model = Detector()

    def loss_fn(m: nn.Module, batch: dict[str, Any]) -> Tensor:
        return m(**batch)[0]

    def batch(rows: int) -> dict[str, Any]:
        labels = [{"boxes": torch.randn(i % 2 + 2, 2)} for i in range(rows)]
        return {"x": torch.randn(rows, 4), "labels": labels}

    engine = GhostEngine(model, loss_fn, batch(3))
    with pytest.raises(GradsightError, match=r"fails on one sample .*labels'\]\[0\]\['boxes'\]"):
        run(engine, model, batch(5), loss_fn, how)


def test_one_pass_falls_back_where_a_dimension_equals_the_rows_of_both_batches() -> None:
    """Funnel drops out entries of a table of positions, here as long as all rows together."""
    from transformers import FunnelConfig, FunnelForSequenceClassification

    torch.manual_seed(0)
    config = FunnelConfig(
        vocab_size=40, block_sizes=[1, 1], d_model=16, n_head=2, d_head=8, d_inner=24,
        num_decoder_layers=1, num_labels=3,
    )  # fmt: skip
    model = FunnelForSequenceClassification(config).train()

    def loss_fn(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return m(**batch).loss

    def batch(rows: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 40, (rows, 8))
        return {"input_ids": ids, "labels": torch.randint(3, (rows,))}

    five, three = batch(5), batch(3)
    torch.manual_seed(7)
    plain = gradient(model, loss_fn(model, five))
    state = torch.get_rng_state()
    engine = GhostEngine(model, loss_fn, three)
    torch.manual_seed(7)
    run(engine, model, five, loss_fn, "loss")
    assert engine.scores.mode == "two_pass"
    assert torch.equal(torch.get_rng_state(), state)
    size = torch.stack([g.norm() for g in plain.values()]).norm()
    named = dict(model.named_parameters())
    off = torch.stack([(named[name].grad - g).norm() for name, g in plain.items()]).norm()
    assert float(off) <= 1e-6 * float(size)
    assert engine.verify(five).passed


def test_slow_scores_are_announced_once() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 4, 12), torch.randn(8, 1, 12)
    model = Spectral(1.0)
    engine = GhostEngine(model, mse, (x[5:], y[5:]), mode="two_pass")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run(engine, model, (x[:5], y[:5]), mse, "observe")
    texts = [str(each.message) for each in caught if issubclass(each.category, GradsightWarning)]
    assert len(texts) == 1
    assert "weight is complex" in texts[0]
    assert "one backward pass each" in texts[0]


@pytest.mark.parametrize("how", ["loss", "observe"])
def test_a_fault_of_the_engine_is_an_error_of_ours(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training must not go on with a gradient that nobody has looked at."""

    def broken(*args: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(BlockScorer, "_keep", broken)
    model = nn.Linear(4, 1)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    engine = GhostEngine(model, mse, (x[5:], y[5:]))
    text = "cannot be scored.*ZeroDivisionError: planted"
    if how == "loss":
        text = "cannot be scored.*.grad may not be that of training.*planted"
    with pytest.raises(GradsightError, match=text):
        run(engine, model, (x[:5], y[:5]), mse, how)
