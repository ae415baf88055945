"""A small language model for tests of everything that does not depend on the architecture."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghost.models import tokens

Pair = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = (
            x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        )
        return x + self.down(self.drop(F.gelu(self.up(self.norm(mixed)))))


class SmallGPT(nn.Module):
    """Tied embeddings, learned positions, blocks, a head; returns logits, or the loss when labels
    are given.
    """

    def __init__(
        self, vocabulary: int = 23, width: int = 8, blocks: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small(dropout: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> SmallGPT:
    torch.manual_seed(seed)
    return SmallGPT(dropout=dropout).to(dtype)


def pair(rows: int, seed: int = 0, ignored: int = 0) -> Pair:
    """Token ids and next tokens; with `ignored`, that many labels of the first row do not count."""
    ids = tokens(rows, 7, 23, seed)
    labels = ids[:, 1:].clone()
    labels[0, :ignored] = -100
    return ids[:, :-1], labels


def loss_fn(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def direction_of(model: nn.Module, batch: Pair) -> dict[str, Tensor]:
    """The gradient of the mean loss of a batch, in evaluation mode."""
    mode = model.training
    model.eval()
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss_fn(model, batch), list(named.values()))
    model.train(mode)
    return dict(zip(named, found, strict=True))


def truth(model: nn.Module, batch: Pair, direction: dict[str, Tensor]) -> Tensor:
    """<direction, g_i> by a backward pass per sample, weighted by its share of the labels that
    count.
    """
    counted = (batch[1] != -100).sum()
    scores = []
    for i in range(len(batch[0])):
        logits = model(batch[0][i : i + 1]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch[1][i], reduction="sum") / counted
        found = torch.autograd.grad(loss, list(model.parameters()))
        scores.append(sum((d * g).sum() for d, g in zip(direction.values(), found, strict=True)))
    return torch.stack(scores)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
