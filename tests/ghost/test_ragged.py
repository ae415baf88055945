"""Scores and gradients over random sequences of batches: other lengths, sizes and masks each time.

A layout that held for one batch must not be trusted for the next one. Every way to select, pad,
pack and pool rows is run through both protocols and compared with a loop over samples.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from gradsight import GhostEngine, GradsightError
from gradsight.errors import GradsightWarning

WIDTH, CLASSES = 4, 3


@dataclass(frozen=True)
class Batch:
    x: Tensor
    """[samples, positions, width]"""
    n: Tensor
    """How many positions of each sample count."""
    y: Tensor
    """A class for each position."""

    def row(self, i: int) -> "Batch":
        return Batch(self.x[i : i + 1], self.n[i : i + 1], self.y[i : i + 1])


class Way(nn.Module):
    """A model that treats its rows in one particular way."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.time_first = nn.LSTM(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def mask(self, x: Tensor, n: Tensor) -> Tensor:
        return torch.arange(x.shape[1]) < n[:, None]


class MeanOfPadded(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        kept = self.f(x).relu() * self.mask(x, n)[..., None]
        return self.head(kept.sum(1) / n[:, None])


class MaskThenPool(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        mask = self.mask(x, n)
        h = self.f(x[mask]).relu()
        return self.head(h.new_zeros(len(x), WIDTH).index_add(0, mask.nonzero()[:, 0], h))


class NonzeroThenScatter(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        rows, columns = self.mask(x, n).nonzero(as_tuple=True)
        h = self.f(x)[rows, columns] * self.shift
        pooled = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        return self.head(pooled.scatter_add(0, rows[:, None].expand_as(h), h))


class FlatIndex(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        flat = self.mask(x, n).flatten().nonzero()[:, 0]
        h = self.f(x.flatten(0, 1).index_select(0, flat)).tanh()
        out = torch.zeros(x.shape[0] * x.shape[1], WIDTH, dtype=x.dtype).index_copy(0, flat, h)
        return self.head(out.view_as(x).sum(1))


class CutAndJoin(Way):
    """Rows cut to their length by Python, and joined."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        lengths = n.tolist()
        h = self.f(torch.cat([x[i, :length] for i, length in enumerate(lengths)])).relu()
        return self.head(torch.stack([part.sum(0) for part in h.split(lengths)]))


class OneByOne(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        pairs = zip(x, n.tolist(), strict=True)
        return torch.stack(
            [self.head(self.f(row[:length]).tanh().mean(0)) for row, length in pairs]
        )


class Packed(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class PackedAndPadded(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out.sum(1))


class SortedByLength(Way):
    """Sorted for the recurrent layer, and put back."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        lengths, order = n.sort(descending=True)
        packed = pack_padded_sequence(self.f(x)[order], lengths, batch_first=True)
        last = self.lstm(packed)[1][0][-1]
        return self.head(last[order.argsort()])


class IntoZeros(Way):
    """Written into a buffer of the longest length that there can be."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        out = torch.zeros(len(x), 8, WIDTH, dtype=x.dtype)
        out[:, : x.shape[1]] = self.f(x) * self.mask(x, n)[..., None]
        return self.head(out.transpose(1, 2).reshape(len(x), WIDTH, 8).sum(2) + self.shift)


class StepByStep(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        out = torch.zeros(len(x), x.shape[1], WIDTH, dtype=x.dtype)
        for t in range(x.shape[1]):
            out[:, t] = self.f(x[:, t]).tanh()
        return self.head((out * self.mask(x, n)[..., None]).sum(1))


class MaskedWrite(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        mask = self.mask(x, n)
        out = torch.zeros_like(x)
        out[mask] = self.f(x[mask]).relu()
        return self.head(out.sum(1))


class LastOfEach(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.f(x).cumsum(1)
        return self.head(h[torch.arange(len(x)), n - 1])


class Gathered(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        last = (n - 1)[:, None, None].expand(-1, 1, WIDTH)
        return self.head(self.f(x).gather(1, last).squeeze(1) * self.shift)


class Flattened(Way):
    """All positions in one dimension, samples outside."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.f(x.reshape(-1, WIDTH)).relu().view_as(x)
        return self.head((h * self.mask(x, n)[..., None]).sum(1))


class TimeFirst(Way):
    """All positions in one dimension, samples inside."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        turned = (x * self.mask(x, n)[..., None]).transpose(0, 1)
        h = self.f(turned.reshape(-1, WIDTH)).tanh().view_as(turned)
        return self.head(self.time_first(h)[0].sum(0))


class PaddedByTorch(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        rows = [self.f(row[:length]) for row, length in zip(x, n.tolist(), strict=True)]
        return self.head(pad_sequence(rows, batch_first=True).relu().sum(1))


class TopOfEach(Way):
    """The largest positions of every sample."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.f(x) * self.mask(x, n)[..., None]
        return self.head(h.topk(min(2, x.shape[1]), dim=1).values.sum(1))


class Routed(Way):
    """Tokens sent to one of two layers."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        flat = (x * self.mask(x, n)[..., None]).flatten(0, 1)
        (left,) = torch.where(flat[:, 0] > 0)
        (right,) = torch.where(flat[:, 0] <= 0)
        out = torch.zeros_like(flat)
        out = out.index_add(0, left, self.f(flat[left]))
        out = out.index_add(0, right, flat[right] * self.shift)
        return self.head(out.view_as(x).sum(1))


class Dispatched(Way):
    """Tokens sent to slots of two layers, and back, by products with a table of zeros and ones."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        flat = (x * self.mask(x, n)[..., None]).flatten(0, 1)
        chosen = F.one_hot((flat[:, 0] > 0).long(), 2)
        place = (chosen.cumsum(0) * chosen).sum(1) - 1
        slots = F.one_hot(place, len(flat)).to(x) * chosen[:, 1:] + 0.0
        inside = torch.einsum("ns,nd->sd", slots, flat)
        back = torch.einsum("ns,sd->nd", slots, self.f(inside))
        return self.head((back + flat * self.shift).view_as(x).sum(1))


class LookedUp(Way):
    """Rows of the batch looked up by numbers, as if they were a table."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        flat = self.mask(x, n).flatten().nonzero()[:, 0]
        h = self.f(F.embedding(flat, x.flatten(0, 1)))
        out = torch.zeros(x.shape[0] * x.shape[1], WIDTH, dtype=x.dtype)
        return self.head(out.index_add(0, flat, h).view_as(x).sum(1))


class CutByTensors(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.f(torch.cat([row[:length] for row, length in zip(x, n, strict=True)]))
        return self.head(torch.stack([part.sum(0) for part in h.split(n.tolist())]))


class Convolved(Way):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.conv((x * self.mask(x, n)[..., None]).transpose(1, 2)).relu()
        return self.head((h.transpose(1, 2) * self.mask(x, n)[..., None]).sum(1))


POOLED = [
    MeanOfPadded, MaskThenPool, NonzeroThenScatter, FlatIndex, CutAndJoin, OneByOne, Packed,
    PackedAndPadded, SortedByLength, IntoZeros, StepByStep, MaskedWrite, LastOfEach, Gathered,
    Flattened, TimeFirst, PaddedByTorch, TopOfEach, Routed, Dispatched,
    LookedUp, CutByTensors, Convolved,
]  # fmt: skip
"""One prediction for each sample."""


class TokensBehindMask(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self.head(self.f(x)[self.mask(x, n)].relu())


class TokensByIndex(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        flat = self.mask(x, n).flatten().nonzero()[:, 0]
        return self.head(self.f(x).flatten(0, 1).index_select(0, flat))


class TokensJoined(Way):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        pairs = zip(self.f(x), n.tolist(), strict=True)
        return self.head(torch.cat([row[:length] for row, length in pairs]).tanh())


class TokensOfPacked(Way):
    """In the order of the packed sequence: that is no order of samples, unless all are as long."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[0].data)


TOKENS = [TokensBehindMask, TokensByIndex, TokensJoined]
"""One prediction for each position that counts."""


def pooled_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.x, batch.n), batch.y[:, 0])


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    counted = torch.arange(batch.x.shape[1]) < batch.n[:, None]
    return F.cross_entropy(model(batch.x, batch.n), batch.y[counted])


Loss = Callable[[nn.Module, Batch], Tensor]


def share(batch: Batch, i: int, loss_fn: Loss) -> float:
    """How much of the mean over the batch is sample i's."""
    if loss_fn is pooled_loss:
        return 1 / len(batch.n)
    return float(batch.n[i]) / float(batch.n.sum())


def random_batch(draw: random.Random, samples: int | None = None) -> Batch:
    """Sizes that meet each other now and then: as many samples as positions, equal lengths."""
    samples = samples or draw.choice([1, 2, 3, 4, 4, 5, 6])
    positions = draw.choice([1, 2, 3, 4, 4, 6])
    lengths = [positions] * samples
    if draw.random() < 0.6:
        lengths = [draw.randint(1, positions) for _ in range(samples)]
    source = torch.Generator().manual_seed(draw.randrange(2**31))
    x = torch.randn(samples, positions, WIDTH, generator=source, dtype=torch.float64)
    y = torch.randint(CLASSES, (samples, positions), generator=source)
    return Batch(x, torch.tensor(lengths), y)


def gradient(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def truth(model: nn.Module, batch: Batch, validation: Batch, loss_fn: Loss) -> Tensor:
    """<validation gradient, sample i's part of the gradient> by a loop over samples."""
    direction = gradient(model, loss_fn(model, validation))
    scores = []
    for i in range(len(batch.n)):
        own = gradient(model, loss_fn(model, batch.row(i)) * share(batch, i, loss_fn))
        scores.append(sum((direction[name] * g).sum() for name, g in own.items()))
    return torch.stack(scores)


@pytest.fixture(autouse=True)
def _notices_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradsightWarning)
        warnings.filterwarnings("ignore", message="dropout option adds dropout")
        yield


def scored(engine: GhostEngine, model: nn.Module, batch: Batch, loss_fn: Loss, how: str) -> Tensor:
    if how == "loss":
        engine.loss(batch_of(batch)).backward()
    else:
        with engine.observe():
            loss_fn(model, batch).backward()
    return engine.scores.total


def batch_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.x, batch.n, batch.y


FIRST_TIER = ((MeanOfPadded, "loss"), (Packed, "loss"), (Packed, "observe"))
WAYS = [
    pytest.param(
        way,
        how,
        id=f"{way.__name__}-{how}",
        marks=() if (way, how) in FIRST_TIER else pytest.mark.slow,
    )
    for way in (*POOLED, *TOKENS)
    for how in ("loss", "observe")
]


@pytest.mark.parametrize(("way", "how"), WAYS)
def test_random_sequences_of_batches(way: type[Way], how: str) -> None:
    """Seven sequences for each way and protocol: 364 in all."""
    loss_fn = pooled_loss if way in POOLED else token_loss

    def of_tuple(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor] | Batch) -> Tensor:
        return loss_fn(model, batch if isinstance(batch, Batch) else Batch(*batch))

    for seed in range(7):
        draw = random.Random(f"{way.__name__} {seed}")
        torch.manual_seed(seed)
        model = way().double()
        validation = random_batch(draw, samples=draw.choice([2, 3]))
        engine_is_exact = seed % 4 == 3
        engine = GhostEngine(model, of_tuple, batch_of(validation), exact_grad=engine_is_exact)
        for _ in range(4):
            batch = random_batch(draw)
            plain = gradient(model, loss_fn(model, batch))
            expected = truth(model, batch, validation, loss_fn)
            model.zero_grad()
            found = scored(engine, model, batch, of_tuple, how)
            scale = max(float(expected.abs().max()), 1e-12)
            assert float((found - expected).abs().max()) / scale < 1e-6, (
                seed,
                batch.n,
                batch.x.shape,
            )
            for name, own in plain.items():
                found_gradient = dict(model.named_parameters())[name].grad
                assert not engine_is_exact or torch.equal(found_gradient, own), (seed, name)
                off = (found_gradient - own).norm()
                assert float(off) <= 1e-10 * max(float(own.norm()), 1e-12), (seed, name, batch.n)
        engine.close()


def test_tokens_in_an_order_that_cannot_be_told_are_refused() -> None:
    torch.manual_seed(0)
    model = TokensOfPacked().double()
    draw = random.Random(0)
    validation = random_batch(draw, samples=3)

    engine = GhostEngine(model, token_mean, validation)
    refused = 0
    for _ in range(8):
        batch = random_batch(draw)
        plain = gradient(model, token_mean(model, batch))
        expected = truth(model, batch, validation, token_mean)
        model.zero_grad()
        equal = len(set(batch.n.tolist())) == 1
        if not equal:
            with pytest.raises(GradsightError, match="not in the order of the samples"):
                engine.loss(batch).backward()
            assert model.head.weight.grad is None
            refused += 1
            continue
        engine.loss(batch).backward()
        assert torch.allclose(engine.scores.total, expected, rtol=1e-9)
        assert torch.allclose(model.head.weight.grad, plain["head.weight"], rtol=1e-12)
    assert 0 < refused < 8


def token_mean(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.x, batch.n).square().mean()


class RoutedWithDropout(Routed):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, self.training), n)


@pytest.mark.parametrize("how", ["loss", "observe"])
@pytest.mark.parametrize("factor", [None, 128.0])
def test_slow_scores_are_shares_of_the_very_step(how: str, factor: float | None) -> None:
    """With its dropout, its share of an accumulated batch, and its loss scale."""
    torch.manual_seed(0)
    model, draw = RoutedWithDropout().double(), random.Random(1)
    validation = random_batch(draw, samples=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=factor or 1.0, enabled=factor is not None)

    def loss_fn(m: nn.Module, batch: tuple[Tensor, ...] | Batch) -> Tensor:
        return pooled_loss(m, batch if isinstance(batch, Batch) else Batch(*batch))

    engine = GhostEngine(model, loss_fn, batch_of(validation))
    for _ in range(3):
        batch = random_batch(draw, samples=5)
        model.zero_grad()
        model.eval()
        direction = gradient(model, pooled_loss(model, validation))
        model.train()
        state = torch.get_rng_state()
        plain = gradient(model, pooled_loss(model, batch) / 4)
        torch.set_rng_state(state)
        if how == "loss":
            scaler.scale(engine.loss(batch_of(batch)) / 4).backward()
        else:
            with engine.observe():
                scaler.scale(loss_fn(model, batch) / 4).backward()
        inner = sum(float((direction[name] * g).sum()) for name, g in plain.items())
        assert float(engine.scores.total.sum()) == pytest.approx(inner, rel=1e-9)
        for name, own in plain.items():
            found = dict(model.named_parameters())[name].grad / (factor or 1.0)
            assert torch.allclose(found, own, rtol=1e-12, atol=0.0)


class SortedForGood(Way):
    """Sorted by length and never put back; the outputs of samples differ little."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        lengths, order = n.sort(descending=True)
        packed = pack_padded_sequence(x[order], lengths, batch_first=True)
        return 1.0 + 1e-3 * self.head(self.lstm(packed)[1][0][-1])


def test_outputs_in_another_order_are_not_taken_for_those_of_other_samples() -> None:
    torch.manual_seed(0)
    model = SortedForGood()
    lengths = torch.tensor([2, 6, 3])
    x = torch.randn(3, 6, WIDTH)

    def loss_fn(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return m(*batch).square().mean()

    engine = GhostEngine(model, loss_fn, (x, torch.tensor([6, 6, 6])), mode="two_pass")
    with (
        pytest.raises(GradsightError, match="not in the order of the samples"),
        engine.observe(),
    ):
        loss_fn(model, (x, lengths)).backward()


def test_a_parameter_that_is_thawed_later_is_scored_by_fast_rules() -> None:
    torch.manual_seed(0)
    model = MeanOfPadded().double()
    model.f.requires_grad_(False)
    draw = random.Random(0)
    validation, batch = random_batch(draw, samples=3), random_batch(draw, samples=4)
    engine = GhostEngine(model, pooled_loss, validation, mode="two_pass")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradsightWarning)
        for _ in range(2):
            with engine.observe():
                pooled_loss(model, batch).backward()
            model.f.requires_grad_(True)
    expected = truth(model, batch, validation, pooled_loss)
    assert torch.allclose(engine.scores.total, expected, rtol=1e-9)
