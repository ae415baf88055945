"""Small training runs with one planted fault each, and ordinary healthy ones, on an MLP, a CNN, an
RNN and a GPT.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsight
from zoo import Report
from zoo.first_step_zoo import Silent, silent_faults, silent_healthy

Batch = tuple[Tensor, Tensor]
WIDTH, CLASSES, LENGTH = 32, 5, 16


class Recurrent(nn.Module):
    def __init__(self, kind: str = "lstm") -> None:
        super().__init__()
        if kind == "lstm":
            self.cell = nn.LSTM(8, WIDTH, batch_first=True)
        else:
            self.cell = nn.RNN(8, WIDTH, batch_first=True, nonlinearity="relu")
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.between = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = self.before(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def mlp(activation: Callable[[], nn.Module] = nn.ReLU, depth: int = 3) -> nn.Module:
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(WIDTH, WIDTH), activation())]
    return nn.Sequential(nn.Linear(20, WIDTH), activation(), *hidden, nn.Linear(WIDTH, CLASSES))


def cnn(
    activation: Callable[[], nn.Module] = nn.ReLU, depth: int = 3, norm: bool = True
) -> nn.Module:
    layers: list[nn.Module] = []
    for index in range(depth):
        channels = 8 if index else 1
        layers.append(nn.Conv2d(channels, 8, 3, padding=1))
        if norm:
            layers.append(nn.BatchNorm2d(8))
        layers.append(activation())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "rnn": Recurrent, "gpt": Gpt}
SHAPES = {"mlp": (20,), "cnn": (1, 8, 8), "rnn": (LENGTH, 8)}


def data(kind: str, size: int, generator: torch.Generator) -> Batch:
    """Inputs and targets that can be learned."""
    if kind == "gpt":
        start = torch.randint(0, 20, (size, 1), generator=generator)
        stride = torch.randint(1, 4, (size, 1), generator=generator)
        tokens = (start + stride * torch.arange(LENGTH + 1)) % 20
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(size, *SHAPES[kind], generator=generator)
    return x, x.flatten(1)[:, :CLASSES].argmax(1)


@dataclass
class Plan:
    """One training run. What a fault changes is a field."""

    kind: str
    seed: int
    steps: int = 120
    lr: float = 2e-3
    batch: int = 32
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    model: Callable[[], nn.Module] | None = None
    prepare: Callable[[nn.Module], None] = lambda model: None
    parameters: Callable[[nn.Module], Any] = lambda model: model.parameters()
    corrupt: Callable[[int, Batch], Batch] = lambda step, batch: batch
    loss: Callable[[nn.Module, Batch, int], Tensor] = lambda model, batch, step: F.cross_entropy(
        model(batch[0]), batch[1]
    )
    clip: float | None = None
    clear: bool = True
    micro: int = 1
    schedule: Callable[[int], float] | None = None
    scaler: float | None = None
    batches: Callable[["Plan", torch.Generator], Iterator[Batch]] | None = None
    losses: list[float] = field(default_factory=list)

    def draw(self, generator: torch.Generator) -> Iterator[Batch]:
        while True:
            yield data(self.kind, self.batch, generator)

    def run(self) -> Report:
        """Train, watched; the health report at the end."""
        torch.manual_seed(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        model = (self.model or MODELS[self.kind])()
        self.prepare(model)
        optimizer = self.optimizer(self.parameters(model), lr=self.lr)
        schedule = scaler = None
        if self.schedule:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        if self.scaler:
            scaler = torch.amp.GradScaler("cpu", init_scale=self.scaler)
        source = (self.batches or Plan.draw)(self, generator)
        with gradsight.watch(model, optimizer, quiet=True) as watched:
            for step in range(self.steps):
                for _ in range(self.micro):
                    loss = self.loss(model, self.corrupt(step, next(source)), step) / self.micro
                    (scaler.scale(loss) if scaler else loss).backward()
                self.losses.append(float(loss.detach()))
                if scaler:
                    scaler.unscale_(optimizer)
                if self.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                if schedule:
                    schedule.step()
                if self.clear:
                    optimizer.zero_grad()
            return watched.report()


def scaled(factor: float) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(factor)

    return prepare


def negative_biases(model: nn.Module) -> None:
    for module in model.modules():
        if (
            isinstance(module, (nn.Linear, nn.Conv2d))
            and module.bias is not None
            and len(module.bias) != CLASSES
        ):
            nn.init.constant_(module.bias, -8.0)


def at(step: int, change: Callable[[Batch], Batch]) -> Callable[[int, Batch], Batch]:
    return lambda now, batch: change(batch) if now == step else batch


def log_of_zero(model: nn.Module, batch: Batch, step: int) -> Tensor:
    p = model(batch[0]).softmax(1)
    if step >= 20:
        p = p * (p > 0.3)
    return F.nll_loss(p.log(), batch[1])


def overflowing(model: nn.Module, batch: Batch, step: int) -> Tensor:
    out = model(batch[0])
    factor = 5000.0 if step >= 20 else 0.01
    return F.cross_entropy(out, batch[1]) + (out * factor).exp().mean() * 1e-3


def half_precision(model: nn.Module, batch: Batch, step: int) -> Tensor:
    x = batch[0].half() if batch[0].is_floating_point() else batch[0]
    return F.cross_entropy(model(x).float(), batch[1]) * 2e-5


class Detached(nn.Module):
    """A branch beside the model whose output is cut off."""

    def __init__(self, inner: nn.Module, classes: int) -> None:
        super().__init__()
        self.inner = inner
        self.branch = nn.Linear(classes, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        side = self.branch(out.transpose(1, -1)).transpose(1, -1)
        return out + side.detach()


def detached(kind: str) -> Callable[[], nn.Module]:
    return lambda: Detached(MODELS[kind](), 20 if kind == "gpt" else CLASSES)


def one_layer_at_zero(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:]}]


def first_is_missing(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())[2:]


def same_again(plan: Plan, generator: torch.Generator) -> Iterator[Batch]:
    while True:  # next(iter(loader)): the loader starts over every time
        yield data(plan.kind, plan.batch, torch.Generator().manual_seed(plan.seed))


def all_zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.zeros_(parameter)


def nan_target(model: nn.Module, batch: Batch, step: int) -> Tensor:
    weight = torch.ones(len(batch[0]))
    if step == 40:
        weight[3] = math.nan
    loss = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    if loss.dim() > 1:
        loss = loss.flatten(1).mean(1)
    return (loss * weight).mean()


def outlier(model: nn.Module, batch: Batch, step: int) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * (500.0 if step == 80 else 1.0)


def summed(model: nn.Module, batch: Batch, step: int) -> Tensor:
    return (model(batch[0]).pow(2).sum(1) * 300).sum()


def growing(model: nn.Module, batch: Batch, step: int) -> Tensor:
    """A loss whose weight grows with the step, as a penalty without an upper end does."""
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]) + (1 + step) * logits.square().mean()


def exploding_rnn() -> nn.Module:
    model = Recurrent("relu")
    with torch.no_grad():
        model.cell.weight_hh_l0.mul_(6)
    return model


BROKEN = {"GS103", "GS104"}
BIG = {"GS101", "GS102"} | BROKEN


def faults() -> Iterator[tuple[str, str, set[str], Callable[[int], Plan | Silent]]]:
    """Name, kind of model, codes that are right, and how to make the plan from a seed."""

    def plans(
        name: str, kinds: str, codes: set[str], **changes: Any
    ) -> Iterator[tuple[str, str, set[str], Callable[[int], Plan]]]:
        for kind in kinds.split():
            given = {
                key: value(kind) if key == "model" else value for key, value in changes.items()
            }
            yield name, kind, codes, lambda seed, kind=kind, given=given: Plan(kind, seed, **given)

    every, floats = "mlp cnn rnn gpt", "mlp cnn rnn"
    yield from plans("learning rate x100, Adam", every, {"GS401", "GS202", *BIG}, lr=0.2)
    yield from plans(
        "learning rate x100, SGD",
        every,
        {"GS401", "GS202", "GS106", "GS107", "GS205", "GS201", *BIG},
        lr=30.0,
        optimizer=torch.optim.SGD,
    )
    yield from plans(
        "initialisation too large", "mlp rnn gpt", {"GS108", *BIG}, prepare=scaled(30.0)
    )
    yield from plans(
        "initialisation of zeros", "mlp gpt", {"GS107", "GS106", "GS301"}, prepare=all_zero
    )
    yield from plans(
        "sigmoid stack",
        "mlp cnn",
        {"GS204", "GS105"},
        model=lambda kind: (
            lambda: mlp(nn.Sigmoid, 10) if kind == "mlp" else cnn(nn.Sigmoid, 10, norm=False)
        ),
    )
    yield from plans(
        "dead ReLU",
        "mlp cnn",
        {"GS205", "GS107", "GS106", "GS301"},
        prepare=negative_biases,
        model=lambda kind: lambda: mlp() if kind == "mlp" else cnn(norm=False),
    )
    yield from plans(
        "loss grows with the step", floats, {"GS202"}, loss=growing, steps=220, lr=1e-5
    )
    yield from plans("log of zero", every, BROKEN, loss=log_of_zero)
    yield from plans("overflow", every, BROKEN, loss=overflowing)
    yield from plans(
        "underflow in float16",
        "mlp gpt",
        {"GS403", "GS106", "GS107"},
        prepare=lambda model: model.half(),
        loss=half_precision,
        optimizer=torch.optim.SGD,
        lr=1e-2,
    )
    yield from plans("frozen layer", every, {"GS304"}, parameters=one_layer_at_zero)
    yield from plans("missing from the optimizer", every, {"GS302"}, parameters=first_is_missing)
    yield from plans(
        "poisoned batch",
        floats,
        {"GS201"},
        corrupt=at(70, lambda batch: (batch[0] * 300, batch[1].flip(0))),
        model=lambda kind: (lambda: cnn(norm=False)) if kind == "cnn" else MODELS[kind],
    )
    yield from plans("outlier in the loss", every, {"GS201"}, loss=outlier)
    yield from plans(
        "exploding RNN",
        "rnn",
        BIG,
        model=lambda kind: exploding_rnn,
        optimizer=torch.optim.SGD,
        lr=1e-2,
    )
    yield from plans("NaN label", every, BROKEN, loss=nan_target)
    yield from plans("zero_grad forgotten", every, {"GS305"}, clear=False)
    yield from plans("data stuck", every, {"GS502"}, batches=same_again)
    yield from plans("detached branch", every, {"GS301"}, model=detached)
    yield from plans(
        "missing normalisation",
        "mlp cnn",
        {"GS108", *BIG},
        corrupt=lambda step, batch: (batch[0] * 500 + 1000, batch[1]),
        model=lambda kind: (lambda: cnn(norm=False)) if kind == "cnn" else MODELS[kind],
    )
    yield from plans(
        "sum instead of mean",
        "mlp rnn",
        {"GS610", "GS401", "GS106", "GS107", "GS205", *BIG},
        loss=summed,
        optimizer=torch.optim.SGD,
        lr=0.05,
    )
    yield from plans(
        "learning rate of nothing", every, {"GS402", "GS304"}, lr=1e-11, optimizer=torch.optim.SGD
    )
    yield from plans("clipped to nothing", every, {"GS405"}, clip=1e-3)
    yield from plans(
        "loss scale collapses",
        "mlp gpt",
        {"GS404"},
        scaler=2.0**16,
        loss=lambda model, batch, step: F.cross_entropy(model(batch[0]), batch[1]) * 1e30 * 1e30,
    )
    yield from silent_faults()


class LowRank(nn.Module):
    """A frozen linear layer with a low-rank adapter that starts at zero."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 4, bias=False)
        self.up = nn.Linear(4, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def learning(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adapted(kind: str) -> nn.Module:
    model = trained(kind).requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, LowRank(child))
    return model


def trained(kind: str) -> nn.Module:
    """A model that has learned for a while, as if loaded from a file."""
    generator = torch.Generator().manual_seed(99)
    model = MODELS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        x, y = data(kind, 32, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return copy.deepcopy(model)


def with_new_head(kind: str) -> nn.Module:
    model = trained(kind)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.out_features in (CLASSES, 20):
                setattr(module, name, nn.Linear(child.in_features, child.out_features))
    return model


def in_bfloat16(model: nn.Module, batch: Batch, step: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch[0])
    return F.cross_entropy(out.float(), batch[1])


def regression(model: nn.Module, batch: Batch, step: int) -> Tensor:
    return (model(batch[0]) - F.one_hot(batch[1], CLASSES)).square().mean()


def warm_up_then_cosine(step: int) -> float:
    return step / 20 if step < 20 else 0.5 * (1 + math.cos(math.pi * (step - 20) / 100))


def one_tensor(plan: Plan, generator: torch.Generator) -> Iterator[Batch]:
    batch = data(plan.kind, 128, generator)
    while True:
        yield batch


def adversaries(kind: str, seed: int) -> list[Report]:
    """Two networks against each other, each with its own optimizer and watch."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    critic = nn.Sequential(nn.Linear(2, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    first, second = (
        torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (maker, critic)
    )
    with (
        gradsight.watch(maker, first, quiet=True) as one,
        gradsight.watch(critic, second, quiet=True) as two,
    ):
        for _ in range(150):
            real, fake = torch.randn(64, 2) * 0.3 + 1, maker(torch.randn(64, 4))
            second.zero_grad()
            (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
            second.step()
            first.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            first.step()
        return [one.report(), two.report()]


def healthy() -> Iterator[tuple[str, str, Callable[[int], Plan | Silent]]]:
    """Ordinary recipes: nothing to find."""
    yield from silent_healthy()
    recipes: dict[str, dict[str, Any]] = {
        "AdamW": {},
        "SGD with momentum": {"optimizer": lambda p, lr: torch.optim.SGD(p, lr=0.05, momentum=0.9)},
        "warm-up and cosine": {"schedule": warm_up_then_cosine, "lr": 3e-3},
        "clipping to 1": {"clip": 1.0},
        "large batch": {"batch": 256, "lr": 4e-3},
        "batch of 4": {"batch": 4, "lr": 1e-3},
        "bf16 autocast": {"loss": in_bfloat16},
        "accumulation of 4": {"micro": 4},
        "regression": {"loss": regression},
        "RMSprop": {"optimizer": lambda p, lr: torch.optim.RMSprop(p, lr=1e-3)},
        "GradScaler": {"scaler": 2.0**16},
        "full batch, to the end": {"batches": one_tensor, "lr": 1e-2, "steps": 250},
        "long": {"steps": 300},
    }
    for kind in MODELS:
        for name, changes in recipes.items():
            if (name, kind) in (("bf16 autocast", "rnn"), ("regression", "gpt")):
                continue  # no such kernel on the CPU; and a language model is no regression
            yield name, kind, lambda seed, kind=kind, changes=changes: Plan(kind, seed, **changes)
        yield (
            "fine-tuning a loaded model",
            kind,
            lambda seed, kind=kind: Plan(kind, seed, lr=3e-4, model=lambda: trained(kind)),
        )
        yield (
            "fine-tuning with a new head",
            kind,
            lambda seed, kind=kind: Plan(kind, seed, lr=5e-4, model=lambda: with_new_head(kind)),
        )
        if kind in ("mlp", "gpt"):
            yield (
                "LoRA",
                kind,
                lambda seed, kind=kind: Plan(
                    kind, seed, model=lambda: adapted(kind), parameters=learning
                ),
            )
