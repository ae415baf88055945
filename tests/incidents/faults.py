"""Training loops with one fault each, and what the flight recorder has to say of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BAD_STEP, STEPS = 5, 8
Batch = tuple[Tensor, ...]


def numbers(step: int, rows: int, width: int) -> Tensor:
    """Always the same batch for a step."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 + step))


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0]).square().mean()


@dataclass
class Fault:
    """One fault: how it is made, and what must be named."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor] = mean_square
    code: str = "GS103"
    operation: str | None = None
    phase: str | None = None
    module: str | None = None
    source: str | None = None
    """Part of the text of the guilty line."""
    samples: list[tuple[int, int]] = field(default_factory=list)
    """Micro-batch and row."""
    lr: float = 1e-3
    steps: int = STEPS
    bad_step: int = BAD_STEP


class Probability(nn.Module):
    """Gives a probability; where the input is far below zero, exactly 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.score(x).clamp_max(0).exp()
            if self.score.bias is None
            else torch.sigmoid(self.score(x))
        )


def log_loss(model: nn.Module, batch: Batch) -> Tensor:
    return -torch.log(model(batch[0])).mean()


def towards_zero(step: int) -> list[Batch]:
    x = numbers(step, 8, 4)
    if step == BAD_STEP:
        torch.manual_seed(0)
        x[3] = -1e6 * nn.Linear(4, 1).weight.detach()[0].sign()
    return [(x,)]


class Distance(nn.Module):
    """A length by hand: its derivative at 0 is 0/0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((x * x).sum(1, keepdim=True))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 6, bias=False)
        self.distance = Distance()
        self.leave = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.distance(self.enter(x)))


def with_zeros(step: int) -> list[Batch]:
    x = numbers(step, 8, 4)
    if step == BAD_STEP:
        x[2] = 0
    return [(x,)]


class Half(nn.Module):
    """Squares in float16, whose largest number is 65504."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half().square().float()


def overflowing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Half(), nn.Linear(4, 1))


def large(step: int) -> list[Batch]:
    x = numbers(step, 8, 4)
    if step == BAD_STEP:
        x[6] = 2000
    return [(x,)]


class Inverse(torch.autograd.Function):
    """The identity, whose backward divides by the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient / x.round(decimals=3)


class Inverted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Inverse.apply(x)  # type: ignore[no-any-return]


def custom() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), Inverted(), nn.Linear(4, 1))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def poisoned(step: int) -> list[Batch]:
    x = numbers(step, 16, 4)
    if step == BAD_STEP:
        x[11, 1] = math.nan
    return [(x,)]


def accumulated(step: int) -> list[Batch]:
    batches = [numbers(10 * step + number, 4, 4) for number in range(4)]
    if step == BAD_STEP:
        batches[2][3, 0] = math.nan
    return [(batch,) for batch in batches]


class Recurrent(nn.Module):
    """A recurrence that multiplies by more than 1 at every step of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = nn.Linear(6, 6, bias=False)
        nn.init.orthogonal_(self.again.weight, gain=1.3)
        self.leave = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for place in range(1, x.shape[1]):
            state = self.again(state) + x[:, place]
        return self.leave(state)


def sequences(step: int) -> list[Batch]:
    x = numbers(step, 6 * 30, 6).reshape(6, 30, 6) * 0.1
    x[4] *= 20
    return [(x,)]


def outlier(step: int) -> list[Batch]:
    x = numbers(step, 8, 4)
    if step == 25:
        x[5] *= 300
    return [(x,)]


def gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 40,
        "n_positions": 12,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "use_cache": False,
    }
    config = transformers.GPT2Config(
        **shape, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model.transformer.wte.weight.data[39] = 3e19  # its square is not a float32
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model  # type: ignore[no-any-return]


def tokens(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, 38, (4, 12), generator=generator)
    if step == BAD_STEP:
        x[2, 6] = 39
    return [(x,)]


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0].clamp_max(37)).loss  # type: ignore[no-any-return]


FAULTS = {
    "log of zero": Fault(
        Probability,
        towards_zero,
        log_loss,
        "GS103",
        "log",
        "loss",
        None,
        "-torch.log(",
        [(0, 3)],
        lr=0.0,
    ),
    "sqrt at zero": Fault(
        Embedded,
        with_zeros,
        mean_square,
        "GS103",
        "sqrt",
        "backward",
        "distance",
        "torch.sqrt(",
        [(0, 2)],
    ),
    "fp16 overflow": Fault(
        overflowing,
        large,
        mean_square,
        "GS103",
        "pow",
        "forward",
        "1",
        "x.half().square()",
        [(0, 6)],
    ),
    "custom backward": Fault(
        custom,
        with_zeros,
        mean_square,
        "GS103",
        "div",
        "backward",
        "1",
        "gradient / x.round",
        [(0, 2)],
        lr=0.0,
    ),
    "NaN in a sample": Fault(
        mlp, poisoned, mean_square, "GS103", "input", "before", None, "model(batch[0])", [(0, 11)]
    ),
    "a micro-batch": Fault(
        mlp, accumulated, mean_square, "GS103", "input", "before", None, "model(batch[0])", [(2, 3)]
    ),
    "exploding RNN": Fault(
        Recurrent, sequences, code="GS102", samples=[(0, 4)], lr=1e-9, bad_step=2
    ),
    "an outlier": Fault(
        linear, outlier, code="GS201", samples=[(0, 5)], lr=1e-3, steps=30, bad_step=25
    ),
    "GPT-2": Fault(
        gpt2,
        tokens,
        language_loss,
        "GS103",
        "native_layer_norm",
        "forward",
        "transformer.h.0.ln_1",
        None,
        [(0, 2)],
    ),
}


def train(fault: Fault, watched: Callable[..., Any]) -> list[bytes]:
    """Train with the fault, and tell every bit of the state after every backward pass and every
    step.
    """
    model = fault.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=fault.lr)
    torch.manual_seed(1)
    history = []
    with watched(model, optimizer) as watch:
        for step in range(fault.steps):
            batches = fault.batches(step)
            for number, batch in enumerate(batches):
                if hasattr(watch, "ids"):
                    watch.ids([f"{step}-{number}-{row}" for row in range(len(batch[0]))])
                (fault.loss(model, batch) / len(batches)).backward()
                history.append(state(model, optimizer))
            optimizer.step()
            history.append(state(model, optimizer))
            optimizer.zero_grad()
    return history


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Weights, gradients, buffers, optimizer state and random numbers, bit for bit."""
    tensors = [
        *model.parameters(),
        *(p.grad for p in model.parameters() if p.grad is not None),
        *model.buffers(),
    ]
    tensors += [
        value
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, Tensor)
    ]
    values = [
        tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for tensor in map(flat, tensors)
    ]
    flags = bytes(module.training for module in model.modules())
    return b"".join([*values, torch.get_rng_state().numpy().tobytes(), flags])


def flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


__all__ = ["FAULTS", "F", "Fault", "state", "train"]
