"""Mixtures of experts that train: balanced, and with experts that the router leaves out."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsight
from zoo import Report

Loop = Callable[[int], list[Report]]
WIDTH = 24
BALANCE = 0.02


class Router(nn.Module):
    """Sends every row to the experts it likes best, and says how even their loads are."""

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(WIDTH, experts, bias=False)
        self.chosen = chosen
        self.unreachable: list[int] = []
        self.unevenness = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        logits = self.weigh(x)
        if self.unreachable:
            logits = logits.index_fill(-1, torch.tensor(self.unreachable), -1e9)
        chances = logits.softmax(-1)
        best, where = chances.topk(self.chosen, -1)
        load = F.one_hot(where, chances.shape[-1]).float().sum(1).mean(0) / self.chosen
        self.unevenness = chances.shape[-1] * (load * chances.mean(0)).sum()
        return torch.zeros_like(chances).scatter(-1, where, best)


class Together(nn.Module):
    """Experts in tensors [E, ...]."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * WIDTH**-0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        inside = torch.einsum("nd,edh->neh", x, self.up).relu()
        return (torch.einsum("neh,ehd->ned", inside, self.down) * weights[..., None]).sum(1)


class Apart(nn.Module):
    """Each expert a module, which is called where it has rows, and only then."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(experts)
        )

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(weights[:, number]).flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return out


class Mixture(nn.Module):
    """Experts behind a router, with a residual around them."""

    def __init__(self, experts: nn.Module, router: Router) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.first = nn.Linear(12, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden + self.experts(hidden, self.router(hidden)))


def mixture(
    seed: int,
    kind: type[nn.Module] = Together,
    chosen: int = 2,
    rows: int = 128,
    change: Callable[[Router, int], None] = lambda router, step: None,
) -> list[Report]:
    """Eight experts; `change` does something to the router before a step."""
    torch.manual_seed(seed)
    router = Router(8, chosen)
    model = Mixture(kind(8), router)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with gradsight.watch(model, optimizer, quiet=True) as watched:
        for step in range(120):
            change(router, step)
            x = torch.randn(rows, 12)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            (loss + BALANCE * router.unevenness).backward()
            optimizer.step()
        return [watched.report()]


def unreachable(router: Router, step: int) -> None:
    """Two experts never get a row."""
    router.unreachable = [2, 5]


def lost_on_the_way(router: Router, step: int) -> None:
    """One expert gets no row any more from some step on."""
    router.unreachable = [1] if step > 30 else []


def left_out_once(router: Router, step: int) -> None:
    """One step in which an expert gets no row."""
    router.unreachable = [3] if step == 16 else []


def mixtures() -> Iterator[tuple[str, set[str], Loop]]:
    """Name, codes that are right, and the loop."""
    for name, kind in (("experts in a tensor", Together), ("experts as modules", Apart)):
        yield name, set(), lambda seed, kind=kind: mixture(seed, kind)
        yield f"{name}, one each", set(), lambda seed, kind=kind: mixture(seed, kind, 1, 256)
        yield (
            f"{name}, one step without",
            set(),
            lambda seed, kind=kind: mixture(seed, kind, change=left_out_once),
        )
        yield (
            f"{name}, two unreachable",
            {"GS207"},
            lambda seed, kind=kind: mixture(seed, kind, change=unreachable),
        )
        yield (
            f"{name}, one lost",
            {"GS207"},
            lambda seed, kind=kind: mixture(seed, kind, change=lost_on_the_way),
        )
