"""Small models, each right or with one fault."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH, ROWS, CLASSES = 20, 16, 8, 4, 5


class Causal(nn.Module):
    """One block of attention over tokens; `extra` are places that see what they must not."""

    def __init__(self, extra: tuple[tuple[int, int], ...] = (), masked: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, WORDS)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        if masked:
            mask = mask.tril()
        for at, seen in extra:
            mask[at, seen] = True
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        query, key, value = self.mix(self.norm(h)).chunk(3, -1)
        seen = self.mask[: x.shape[1], : x.shape[1]]
        h = h + self.drop(F.scaled_dot_product_attention(query, key, value, attn_mask=seen))
        return self.head(h)


class Flat(Causal):
    """The same with rows and positions in one dimension, and its own loss."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x).view(-1, WORDS)
        return logits, F.cross_entropy(logits, y.reshape(-1))


class OnlyLoss(Flat):
    """The same, and gives nothing but its loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y)[1]


class TimeFirst(nn.Module):
    """An LSTM with time before rows, as the word language model of PyTorch's examples has it."""

    def __init__(self, both_ways: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.LSTM(WIDTH, WIDTH, bidirectional=both_ways)
        self.head = nn.Linear(WIDTH * (1 + both_ways), WORDS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(self.tokens(x))[0])
        return logits.view(-1, WORDS)


class Zeroed(Causal):
    """A causal model, or one that leaks, whose last weights start at zero."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class Packed(Causal):
    """Rows of several documents; kept apart or not."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        h = self.tokens(x) + self.places(position_ids)
        query, key, value = self.mix(self.norm(h)).chunk(3, -1)
        seen = self.mask[None].expand(len(x), -1, -1)
        if self.apart:
            documents = (position_ids == 0).cumsum(1)
            seen = seen & (documents[:, :, None] == documents[:, None, :])
        return self.head(h + F.scaled_dot_product_attention(query, key, value, attn_mask=seen))


class Rows(nn.Module):
    """Classifies rows; `wrong` makes them see each other."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        self.first = nn.Linear(6, WIDTH)
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=wrong != "recurrence")
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.wrong == "noise":
            x = torch.randn_like(x)
        if self.wrong == "nothing":
            x = x * 0
        h = self.cell(self.first(x).relu())[0][:, -1]
        if self.wrong == "softmax":
            h = h.softmax(0)
        if self.wrong == "centred":
            h = h - h.mean(0)
        out: Tensor = self.last(self.norm(h))
        return out.softmax(1) if self.wrong == "probabilities" else out


class Similarities(nn.Module):
    """Compares all rows with all, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, WIDTH)
        self.other = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.one(x) @ self.other(y).T


class Graph(nn.Module):
    """Nodes that see their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        hidden = (adjacency @ self.first(x)).relu()
        return adjacency @ self.last(hidden)


class Experts(nn.Module):
    """Experts with room for two rows each: who comes third is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            mine = torch.nonzero(chosen == number).flatten()[:2]
            out = out.index_add(0, mine, expert(x[mine]) * weights[mine, number, None])
        return out


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def labelled(rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, 7, 6, generator=generator)
    return x, torch.arange(rows) % CLASSES
