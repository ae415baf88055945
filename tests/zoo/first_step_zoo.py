"""Training loops with a fault that no gradient norm shows, and similar healthy loops.

The fault is in the model, the loss or the loop itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsight
from zoo import Report

WORDS, WIDTH, LENGTH, CLASSES, STEPS = 20, 32, 16, 5, 30


class Attention(nn.Module):
    """Causal attention, unless `leak` says otherwise; `apart` separates documents."""

    def __init__(self, leak: str = "", apart: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, WORDS)
        self.apart = apart
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        shapes = {"all": mask, "next": mask.tril(1), "first": mask.tril()}
        mask = shapes.get(leak, mask.tril()).clone()
        mask[0] |= leak == "first"
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(x.shape[1]) if position_ids is None else position_ids
        seen = self.mask[None].expand(len(x), -1, -1)
        if self.apart and position_ids is not None:
            documents = (position_ids == 0).cumsum(1)
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        h = self.tokens(x) + self.places(places)
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            query, key, value = mix(norm(h)).chunk(3, -1)
            h = h + self.drop(F.scaled_dot_product_attention(query, key, value, attn_mask=seen))
        return self.head(h)


class Classifier(nn.Module):
    """An LSTM over short series, with BatchNorm and dropout."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.cell = nn.LSTM(8, WIDTH, batch_first=fault != "rows")
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "input":
            x = torch.zeros_like(x)
        out = self.head(self.drop(self.norm(self.cell(x)[0][:, -1])))
        return out.softmax(1) if self.fault == "softmax" else out


def texts(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, WORDS, (16, 1), generator=generator)
        stride = torch.randint(1, 4, (16, 1), generator=generator)
        yield (start + stride * torch.arange(LENGTH + 1)) % WORDS


def series(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(24, 6, 8, generator=generator)
        yield x, x.mean(1)[:, :CLASSES].argmax(1)


@dataclass
class Silent:
    """One loop; what a fault changes is a field."""

    seed: int
    model: Callable[[], nn.Module] = Classifier
    source: Callable[[int], Iterator[Any]] = series
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: F.cross_entropy(
        model(batch[0]), batch[1]
    )
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    lr: float = 2e-3
    micro: int = 1
    divided: bool = True
    lost: bool = False
    evaluating: Callable[[int], bool] = lambda step: False
    losses: list[float] | None = None

    def run(self) -> Report:
        """Train, watched; the health report at the end."""
        torch.manual_seed(self.seed)
        self.losses = []
        model = self.model()
        optimizer = self.optimizer(model.parameters(), lr=self.lr)
        batches = self.source(self.seed)
        with gradsight.watch(model, optimizer, quiet=True) as watched:
            for step in range(STEPS):
                model.train(not self.evaluating(step))
                for number in range(self.micro):
                    if self.lost or number == 0:
                        optimizer.zero_grad()
                    loss = self.loss(model, next(batches))
                    (loss / self.micro if self.divided else loss).backward()
                self.losses.append(float(loss.detach()))
                optimizer.step()
            return watched.report()


def ahead(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).reshape(-1, WORDS), batch[:, 1:].reshape(-1))


def shifted_twice(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])[:, :-1]
    return F.cross_entropy(logits.reshape(-1, WORDS), batch[:, 2:].reshape(-1))


def of_few(model: nn.Module, batch: Tensor) -> Tensor:
    few = torch.arange(len(batch))[:, None] % 4 == 0
    targets = batch[:, 1:].masked_fill(~few, -100)
    return F.cross_entropy(model(batch[:, :-1]).reshape(-1, WORDS), targets.reshape(-1))


def of_answers(model: nn.Module, batch: Tensor) -> Tensor:
    targets = batch[:, 1:].masked_fill(torch.arange(LENGTH) < LENGTH // 2, -100)
    return F.cross_entropy(model(batch[:, :-1]).reshape(-1, WORDS), targets.reshape(-1))


def same(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).reshape(-1, WORDS), batch[:, :-1].reshape(-1))


def masked(model: nn.Module, batch: Tensor) -> Tensor:
    hidden = torch.rand(batch[:, :-1].shape) < 0.3
    logits = model(batch[:, :-1].masked_fill(hidden, 0))
    targets = batch[:, :-1].masked_fill(~hidden, -100)
    return F.cross_entropy(logits.reshape(-1, WORDS), targets.reshape(-1))


def packed(model: nn.Module, batch: Tensor) -> Tensor:
    lengths = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)])
    logits = model(batch[:, :-1], position_ids=lengths.repeat(len(batch), 1))
    return F.cross_entropy(logits.reshape(-1, WORDS), batch[:, 1:].reshape(-1))


def unlabelled(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), torch.full_like(batch[1], -100))


def probabilities(model: nn.Module, batch: Any) -> Tensor:
    return F.nll_loss(model(batch[0]).softmax(1), batch[1])


def logarithms(model: nn.Module, batch: Any) -> Tensor:
    return F.nll_loss(model(batch[0]).log_softmax(1), batch[1])


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


Plans = Iterator[tuple[str, str, set[str], Callable[[int], Silent]]]


def silent_faults() -> Plans:
    """Name, kind of model, codes that are right, and how to make the loop from a seed."""
    text: dict[str, Any] = {"source": texts, "loss": ahead, "model": Attention}
    plain: dict[str, Any] = {"optimizer": torch.optim.SGD}
    given: list[tuple[str, str, str, dict[str, Any]]] = [
        ("mask forgotten", "gpt", "GS601", text | {"model": lambda: Attention("all")}),
        ("mask off by one", "gpt", "GS601", text | {"model": lambda: Attention("next")}),
        ("the first sees all", "gpt", "GS601", text | {"model": lambda: Attention("first")}),
        ("recurrence over rows", "rnn", "GS602", {"model": lambda: Classifier("rows")}),
        ("packed, not kept apart", "gpt", "GS603", text | {"loss": packed}),
        ("targets not shifted", "gpt", "GS604", text | {"loss": same}),
        ("softmax twice", "rnn", "GS605", {"model": lambda: Classifier("softmax")}),
        ("nll_loss of probabilities", "rnn", "GS605", {"loss": probabilities}),
        ("no label counts", "rnn", "GS606", {"loss": unlabelled}),
        ("input overwritten", "rnn", "GS607", {"model": lambda: Classifier("input")}),
        ("evaluation mode", "rnn", "GS608", {"evaluating": lambda step: True}),
        ("left in evaluation mode", "rnn", "GS608", {"evaluating": lambda step: step > 9}),
        ("accumulation not divided", "rnn", "GS609", {"micro": 4, "divided": False}),
        ("sum with a rate for a mean", "rnn", "GS610", plain | {"loss": summed, "lr": 0.3}),
        ("cleared too often", "rnn", "GS611", {"micro": 2, "lost": True}),
        ("labels shifted twice", "gpt", "GS612", text | {"loss": shifted_twice}),
        ("few samples have labels", "gpt", "GS614", text | {"loss": of_few}),
    ]  # fmt: skip
    for name, kind, code, changes in given:
        yield name, kind, {code}, lambda seed, changes=changes: Silent(seed, **changes)


def silent_healthy() -> Iterator[tuple[str, str, Callable[[int], Silent]]]:
    """The nearest loops in which nothing is wrong."""
    text: dict[str, Any] = {"source": texts, "loss": ahead, "model": Attention}
    apart = text | {"loss": packed, "model": lambda: Attention(apart=True)}
    slowly = {"loss": summed, "optimizer": torch.optim.SGD, "lr": 1e-3}
    whole: dict[str, Any] = text | {"model": lambda: Attention("all")}
    given: list[tuple[str, str, dict[str, Any]]] = [
        ("causal", "gpt", text),
        ("autoencoder of tokens", "gpt", whole | {"loss": same}),
        ("masked language model", "gpt", whole | {"loss": masked}),
        ("packed, kept apart", "gpt", apart),
        ("half of the labels", "gpt", text | {"loss": of_answers}),
        ("BatchNorm and dropout", "rnn", {}),
        ("log_softmax and nll_loss", "rnn", {"loss": logarithms}),
        ("label smoothing", "rnn", {"loss": smoothed}),
        ("validation now and then", "rnn", {"evaluating": lambda step: False}),
        ("accumulation divided", "rnn", {"micro": 4}),
        ("sum with Adam", "rnn", {"loss": summed}),
        ("sum with a rate for it", "rnn", slowly),
    ]  # fmt: skip
    for name, kind, changes in given:
        yield name, kind, lambda seed, changes=changes: Silent(seed, **changes)
