"""Training loops modelled on public scripts: each as it is, and with a fault.

A loop is a function of a seed that trains, watched, and returns the reports of its models.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsight
from zoo import Report
from zoo.plans import LENGTH, WIDTH, Block, LowRank

Loop = Callable[[int], list[Report]]
VOCABULARY = 24


class Text:
    """Characters of a language whose next one depends on the last, and that are not equally
    frequent.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        frequency = torch.linspace(3, -1, VOCABULARY).softmax(0)
        bonds = (2.5 * torch.randn(VOCABULARY, VOCABULARY, generator=self._generator)).exp()
        self._next = bonds * frequency
        self._frequency = frequency

    def batch(self, rows: int = 16, length: int = LENGTH) -> tuple[Tensor, Tensor]:
        tokens = [torch.multinomial(self._frequency, rows, True, generator=self._generator)]
        for _ in range(length):
            rates = self._next[tokens[-1]]
            tokens.append(torch.multinomial(rates, 1, generator=self._generator)[:, 0])
        drawn = torch.stack(tokens, 1)
        return drawn[:, :-1], drawn[:, 1:]


class Characters(nn.Module):
    """A small GPT, initialised as nanoGPT is."""

    def __init__(self, layers: int = 2, std: float | None = 0.02) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1 and std is not None:
                nn.init.normal_(parameter, std=std)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@dataclass
class Training:
    """The plain loop around a model and one or several optimizers."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    loss: Callable[[int], Tensor]
    steps: int = 130
    clip: float | None = None
    rate: Callable[[int], float] | None = None
    after: Callable[[int], Any] = lambda step: None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> list[Report]:
        base = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        with gradsight.watch(self.model, self.optimizers, quiet=True, **self.options) as watched:
            for step in range(self.steps):
                if self.rate is not None:
                    for optimizer, rates in zip(self.optimizers, base, strict=True):
                        for group, rate in zip(optimizer.param_groups, rates, strict=True):
                            group["lr"] = rate * self.rate(step)
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                self.loss(step).backward()
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
                for optimizer in self.optimizers:
                    optimizer.step()
                self.after(step)
            return [watched.report()]


def warm_up(steps: int, over: int = 130) -> Callable[[int], float]:
    """A warm-up, then a cosine down to a tenth."""

    def rate(step: int) -> float:
        if step < steps:
            return (step + 1) / steps
        return 0.55 + 0.45 * math.cos(math.pi * (step - steps) / (over - steps))

    return rate


def characters(seed: int, times: float = 1.0, decay: float = 0.1) -> list[Report]:
    """nanoGPT's recipe: decay for matrices alone, warm-up, cosine, clipping at 1."""
    torch.manual_seed(seed)
    model, text = Characters(), Text(seed)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3 * times, betas=(0.9, 0.99))
    training = Training(model, [optimizer], lambda step: loss_of(model, text.batch()))
    training.clip = 1.0
    training.rate = warm_up(30)
    return training.run()


def names(seed: int, times: float = 1.0) -> list[Report]:
    """makemore's: torch's own initialisation, one learning rate, no clipping."""
    torch.manual_seed(seed)
    model, text = Characters(std=None), Text(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * times, weight_decay=0.01)
    return Training(model, [optimizer], lambda step: loss_of(model, text.batch())).run()


class Coder(nn.Module):
    """An autoencoder with noise between its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.mean = nn.Linear(48, 8)
        self.spread = nn.Linear(48, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        kept = F.binary_cross_entropy_with_logits(self.decoder(code), x, reduction="sum")
        return kept - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()


def variational(seed: int, lr: float = 1e-3, sgd: bool = False) -> list[Report]:
    """A loss that is a sum by design: its norm is in the thousands, and Adam does not mind."""
    torch.manual_seed(seed)
    model = Coder()
    patterns = (torch.rand(12, 64) > 0.6).to(torch.get_default_dtype())
    kind = torch.optim.SGD if sgd else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=lr)

    def loss(step: int) -> Tensor:
        noise = torch.rand(128, 64) < 0.05
        return model(
            (patterns[torch.randint(12, (128,))].bool() ^ noise).to(torch.get_default_dtype())
        )

    return Training(model, [optimizer], loss).run()


def informed(seed: int, copied: bool = False) -> list[Report]:
    """InfoGAN's: a third optimizer over both networks. Copied: one network in two, one in none."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(10, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 8))
    body = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(0.2))
    critic = nn.ModuleDict({"body": body, "real": nn.Linear(WIDTH, 1), "code": nn.Linear(WIDTH, 4)})
    both = nn.ModuleDict({"maker": maker, "critic": critic})
    second_net = maker if copied else critic
    first = torch.optim.Adam(maker.parameters(), 5e-4, betas=(0.5, 0.999))
    second = torch.optim.Adam(second_net.parameters(), 5e-4, betas=(0.5, 0.999))
    optimizers = [first, second]
    if not copied:
        third = itertools.chain(maker.parameters(), critic.parameters())
        optimizers.append(torch.optim.Adam(third, 5e-4))
    with gradsight.watch(both, optimizers, quiet=True) as watched:
        for _ in range(100):
            code = torch.randint(4, (32,))
            noise = torch.cat(
                [torch.randn(32, 6), F.one_hot(code, 4).to(torch.get_default_dtype())], 1
            )
            real = torch.randn(32, 8) * 0.5 + 1
            first.zero_grad()
            made = maker(noise)
            (critic["real"](body(made)) - 1).square().mean().backward()
            first.step()
            second.zero_grad()
            seen = (critic["real"](body(real)) - 1).square().mean()
            (seen + critic["real"](body(made.detach())).square().mean()).backward()
            second.step()
            for optimizer in optimizers[2:]:
                optimizer.zero_grad()
                F.cross_entropy(critic["code"](body(maker(noise))), code).backward()
                optimizer.step()
        return [watched.report()]


def policy(seed: int, limit: float = 0.5) -> list[Report]:
    """PPO's: a value loss whose gradient is large at first, clipped at half of one every step."""
    torch.manual_seed(seed)
    actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    model = nn.ModuleDict({"actor": actor, "value": value})
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)

    def loss(step: int) -> Tensor:
        state = torch.randn(64, 4)
        choice = torch.distributions.Categorical(logits=actor(state))
        action = choice.sample()
        gained = ((action == 1) == (state[:, 0] > 0)).to(torch.get_default_dtype())
        wanted = 12 + 6 * gained + state[:, 1]
        advantage = (gained - gained.mean()) / (gained.std() + 1e-8)
        pushed = -(choice.log_prob(action) * advantage).mean()
        missed = 0.5 * (value(state)[:, 0] - wanted).square().mean()
        return pushed + 0.5 * missed - 0.01 * choice.entropy().mean()

    return Training(model, [optimizer], loss, clip=limit).run()


class Words(nn.Module):
    """A word language model: an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.words(x))[0])


def words(seed: int, anew: bool = False) -> list[Report]:
    """SGD at a high rate, clipped at a quarter. Anew: the weights are drawn again after a step."""
    torch.manual_seed(seed)
    model, text = Words(), Text(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)

    def again(step: int) -> None:
        for module in model.children():
            module.reset_parameters()

    training = Training(model, [optimizer], lambda step: loss_of(model, text.batch()), clip=0.25)
    if anew:
        training.after = again
    return training.run()


def digits(seed: int, per_batch: bool = False, net: nn.Module | None = None) -> list[Report]:
    """A classifier of images with Adadelta and a scheduler for epochs. Per batch: at every step."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5),
    )  # fmt: skip
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 1, 8, 8)
        return F.nll_loss(F.log_softmax(model(x), 1), x.flatten(1)[:, :5].argmax(1))

    training = Training(model, [optimizer], loss)
    training.after = lambda step: scheduler.step() if per_batch or step % 40 == 39 else None
    return training.run()


class Orthogonal(torch.optim.Optimizer):
    """What Muon does, with an exact polar factor: matrices only."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                held = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                held.mul_(group["momentum"]).add_(parameter.grad)
                u, _, v = torch.linalg.svd(held, full_matrices=False)
                parameter.sub_(u @ v, alpha=group["lr"])


def two_optimizers(seed: int, misplaced: str = "") -> list[Report]:
    """Hidden matrices to Muon, the rest to AdamW. Misplaced: some matrices fell to AdamW."""
    torch.manual_seed(seed)
    model, text = Characters(layers=3), Text(seed)
    hidden, rest = [], []
    for name, parameter in model.named_parameters():
        is_hidden = name.startswith("blocks") and parameter.dim() == 2
        wrong = bool(misplaced) and misplaced in name
        (hidden if is_hidden and not wrong else rest).append(parameter)
    first = Orthogonal(hidden, lr=0.02)
    second = torch.optim.AdamW(rest, lr=3e-4 if misplaced else 2e-3)
    loss = lambda step: loss_of(model, text.batch())  # noqa: E731
    return Training(model, [first, second], loss, clip=1.0).run()


def fine_tuned(seed: int, wrong: bool = False) -> list[Report]:
    """Layer-wise rates: each layer below the head half of the one above it. Wrong: one apart."""
    torch.manual_seed(seed)
    model, text = Characters(layers=4, std=0.05), Text(seed)
    groups = [{"params": model.head.parameters(), "lr": 3e-3}]
    for depth, block in enumerate(reversed(model.blocks)):
        groups.append({"params": block.parameters(), "lr": 3e-3 * 0.5 ** (depth + 1)})
    lowest = [*model.tokens.parameters(), *model.positions.parameters(), *model.norm.parameters()]
    groups.append({"params": lowest, "lr": 1e-4})
    if wrong:
        groups[2]["lr"] = 3e-6
    optimizer = torch.optim.AdamW(groups)
    return Training(model, [optimizer], lambda step: loss_of(model, text.batch())).run()


def adapters(seed: int) -> list[Report]:
    """LoRA+: the second halves of the adapters learn sixteen times as fast."""
    torch.manual_seed(seed)
    model, text = Characters(layers=2, std=0.1), Text(seed)
    model.requires_grad_(False)
    for block in model.blocks:
        block.mlp[0], block.mlp[2] = LowRank(block.mlp[0]), LowRank(block.mlp[2])
    slow = [p for name, p in model.named_parameters() if ".down." in name]
    fast = [p for name, p in model.named_parameters() if ".up." in name]
    optimizer = torch.optim.AdamW([{"params": slow}, {"params": fast, "lr": 16e-4}], lr=1e-4)
    return Training(model, [optimizer], lambda step: loss_of(model, text.batch())).run()


def graph(seed: int) -> list[Report]:
    """A graph network: the whole graph at every step, dropout, decay as a penalty."""
    torch.manual_seed(seed)
    features, near = torch.randn(60, 16), torch.rand(60, 60) < 0.1
    spread = (near | near.T | torch.eye(60, dtype=torch.bool)).to(torch.get_default_dtype())
    spread = spread / spread.sum(1, keepdim=True)
    labels = (spread @ features)[:, :3].argmax(1)
    model = nn.ModuleDict({"first": nn.Linear(16, 16), "last": nn.Linear(16, 3)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def loss(step: int) -> Tensor:
        hidden = F.dropout(spread @ model["first"](F.dropout(features)).relu())
        return F.cross_entropy(spread @ model["last"](hidden), labels)

    return Training(model, [optimizer], loss).run()


def fading(seed: int, dies: bool = False) -> list[Report]:
    """No optimizer is watched. Dies: one layer loses its gradient little by little."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    share = [1.0]
    if dies:
        model[2].weight.register_hook(lambda gradient: gradient * share[0])
    with gradsight.watch(model, quiet=True) as watched:
        for _ in range(300):
            x = torch.randn(16, 16)
            F.mse_loss(model(x), x.roll(1, 1)).backward()
            watched.step()
            optimizer.step()
            optimizer.zero_grad()
            share[0] *= 0.95
        return [watched.report()]


def halved(seed: int, eps: float = 1e-8) -> list[Report]:
    """Weights in float16: with an eps that float16 knows, and with Adam's own, which is 0 there."""
    torch.manual_seed(seed)
    model, text = Words().half(), Text(seed)
    model.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)  # no such kernel in float16 on the CPU
    model.words.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps)

    def loss(step: int) -> Tensor:
        x, y = text.batch()
        hidden = model.cell(model.words(x))[0].half()
        return F.cross_entropy(model.out(hidden).float().flatten(0, 1), y.flatten())

    return Training(model, [optimizer], loss, steps=60).run()


LONG_STEPS = {"GS401", "GS206", "GS103"}


def loops() -> Iterator[tuple[str, set[str], Loop]]:
    """Name, codes that are right (none: healthy), and the loop."""
    yield "characters", set(), characters
    yield "characters, rate x3", set(), lambda seed: characters(seed, 3)
    yield "characters, rate x100", LONG_STEPS, lambda seed: characters(seed, 100)
    yield "characters, decay 150", {"GS406"}, lambda seed: characters(seed, decay=150.0)
    yield "characters, decay 1", set(), lambda seed: characters(seed, decay=1.0)
    yield "names", set(), names
    yield "names, rate x100", LONG_STEPS, lambda seed: names(seed, 100)
    yield "a sum by design", set(), variational
    yield "a sum by design, SGD", set(), lambda seed: variational(seed, 1e-5, sgd=True)
    long = {"GS610", "GS101", "GS102", *LONG_STEPS}
    yield "a sum, steps too long", long, lambda seed: variational(seed, 1e-2, sgd=True)
    yield "a third optimizer", set(), informed
    yield "a copied line", {"GS303", "GS302"}, lambda seed: informed(seed, copied=True)
    yield "policy, clipped", set(), policy
    yield "policy, clipped to nothing", {"GS405"}, lambda seed: policy(seed, 1e-4)
    yield "words", set(), words
    yield "words, drawn anew", {"GS304"}, lambda seed: words(seed, anew=True)
    yield "digits", set(), digits
    yield "digits, scheduled per batch", {"GS407"}, lambda seed: digits(seed, per_batch=True)
    yield "two optimizers", set(), two_optimizers
    yield "some matrices to Adam", {"GS408"}, lambda seed: two_optimizers(seed, "attention.out")
    yield "one block to Adam", {"GS408"}, lambda seed: two_optimizers(seed, "blocks.1")
    yield "layer-wise rates", set(), fine_tuned
    yield "one layer apart", {"GS408"}, lambda seed: fine_tuned(seed, wrong=True)
    yield "LoRA+", set(), adapters
    yield "graph", set(), graph
    yield "no optimizer watched", set(), fading
    yield "one layer fades", {"GS203"}, lambda seed: fading(seed, dies=True)
    yield "float16 weights, eps 1e-4", set(), lambda seed: halved(seed, 1e-4)
    yield "float16 weights, eps 1e-8", {"GS103", "GS104"}, halved
