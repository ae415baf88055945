"""Planted faults: a step whose gradient is not finite, and what a diagnosis must say about it.
Lines carry their marker.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH = 16, 6


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # calls the model


@dataclass
class Fault:
    """A step, and the truth about it."""

    build: Callable[[], nn.Module]
    batches: Callable[[], list[Any]]
    operation: str
    phase: str
    module: str | None
    marker: str | None
    """The comment at the end of the guilty line; None where the line is a library's."""
    samples: set[tuple[int, int]]
    """(micro-batch, row)."""
    loss: Callable[[nn.Module, Any], Tensor] = squared
    detail: str = ""
    library: str = ""
    compiled: Callable[[nn.Module], None] | None = None
    """Compiles the model after its step."""


def rows(*special: tuple[int, float], count: int = ROWS, width: int = WIDTH) -> Tensor:
    """Random rows; those given by number are filled with a value."""
    x = torch.rand(count, width, generator=torch.Generator().manual_seed(1)) + 0.5
    for row, value in special:
        x[row] = value
    return x


class Body(nn.Module):
    """A layer, something in the middle, a layer."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = middle
        self.last = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))  # layer by layer


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scaled = x * 2
        return scaled.log()  # log in the model


class LogInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).log_()  # log in place


class Length(nn.Module):
    """Finite forward, but the derivative of the root at zero is not."""

    def forward(self, x: Tensor) -> Tensor:
        length = torch.sqrt((x * x).sum(-1, keepdim=True))  # sqrt at zero
        return x + length


class OwnLoss(nn.Module):
    """Returns its loss and what that is computed from, to which a broken gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        lengths = (y * y).sum(-1).sqrt()  # root in a loss of its own
        return lengths.mean(), y


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul(1000).half().float()  # fp16 overflow


class DivideBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (x - 3.0)  # custom backward


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return DivideBackward.apply(x)


class OneSidedWhere(nn.Module):
    """The unused side of a where: finite forward, 0/0 in the log's derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.log(), x)  # one-sided where


class Masked(nn.Module):
    """Attention weights over a row in which everything is masked; before it a mask that is made of
    -inf by log, and heals.
    """

    def forward(self, x: Tensor) -> Tensor:
        healing = torch.tensor([1.0, 0, 1, 1, 1, 1]).log()
        weights = (x + healing).softmax(-1)
        hidden = x == 7.0
        scores = x.masked_fill(hidden, float("-inf"))
        return weights * scores.softmax(-1)  # nothing left to attend to


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * torch.full((), float("inf"))  # infinitely many


class ZeroTimes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((WIDTH,), float("-inf"))
        return (x.detach() * mask).exp() + x  # zero times infinity


class Recurrent(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.cell.weight.copy_(torch.eye(WIDTH) * factor)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(30):
            x = self.cell(x)  # one step of the recurrence
        return x


def relu_rnn() -> nn.Module:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(WIDTH, WIDTH, nonlinearity="relu", batch_first=True)
            with torch.no_grad():
                self.rnn.weight_hh_l0.copy_(torch.eye(WIDTH) * 40)
                self.rnn.weight_ih_l0.copy_(torch.eye(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            states, _ = self.rnn(x)  # reads the sequence
            return states[:, -1]

    return Reader()


def poisoned_weight() -> nn.Module:
    model = Body(nn.Tanh())
    with torch.no_grad():
        model.last.weight[0, 0] = float("nan")
    return model


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.log(x - 1e9)  # planted in a block


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sqrt(x * 0.0)  # planted derivative


def gpt2(
    activation: nn.Module | None = None,
    *,
    dropout: float = 0.1,
    checkpointed: bool = True,
    **options: Any,
) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        **options,
    )
    model = GPT2LMHeadModel(config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if activation is not None:
        model.transformer.h[1].mlp.act = activation
    return model.train()


def heavy_gpt2() -> nn.Module:
    model = gpt2()
    with torch.no_grad():
        model.get_submodule("transformer.h.1.mlp.c_fc").weight.mul_(1e20)
    return model


def tokens(count: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(0, 40, (count, 7), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # calls GPT-2


def log_loss(model: nn.Module, x: Tensor) -> Tensor:
    p = model(x).softmax(-1)  # calls the model for its log loss
    return -p.log().mean()  # log in the loss


def summed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def large(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum() * 1e20


def in_float16(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return model(x).float().square().mean()


def bare() -> nn.Module:
    return Body(nn.Identity())


def identity() -> nn.Module:
    model = Body(nn.Identity())
    with torch.no_grad():
        model.last.weight.copy_(torch.eye(WIDTH))
        model.last.bias.zero_()
    return model


def doubling() -> nn.Module:
    model = identity()
    with torch.no_grad():
        model.get_submodule("last").weight.mul_(2)
    return model


def wide() -> Tensor:
    """Row 9's outputs differ so much that softmax gives exact zeros."""
    x = rows()
    x[9, 0], x[9, 1] = 500.0, -500.0
    return x


def compiled_in_place(model: nn.Module) -> None:
    model.compile(backend="eager")


def compiled_in_part(model: nn.Module) -> None:
    model.middle = torch.compile(model.middle, backend="eager")


GPT2 = {(0, row) for row in range(3)}

FAULTS = {
    "log in a loss outside": Fault(
        identity,
        lambda: [wide()],
        "log",
        "loss",
        None,
        "calls the model for its log loss",
        {(0, 9)},
        log_loss,
    ),
    "log in the model": Fault(
        lambda: Body(Log()),
        lambda: [rows((4, 0.0))],
        "log",
        "forward",
        "middle",
        "log in the model",
        {(0, 4)},
    ),
    "log in the model under a plain sum": Fault(
        lambda: Body(Log()),
        lambda: [rows((4, 0.0))],
        "log",
        "forward",
        "middle",
        "log in the model",
        {(0, 4)},
        summed,
    ),
    "log in place": Fault(
        lambda: Body(LogInPlace()),
        lambda: [rows((4, 0.0))],
        "log",
        "forward",
        "middle",
        "log in place",
        {(0, 4)},
    ),
    "sqrt at zero": Fault(
        lambda: Body(Length()),
        lambda: [rows((11, 0.0))],
        "sqrt",
        "backward",
        "middle",
        "sqrt at zero",
        {(0, 11)},
    ),
    "a loss of the model's own": Fault(
        OwnLoss,
        lambda: [rows((10, 0.0))],
        "sqrt",
        "backward",
        "",
        "root in a loss of its own",
        {(0, 10)},
        lambda model, x: model(x)[0],
    ),
    "fp16 overflow": Fault(
        lambda: Body(Half()),
        lambda: [rows((2, 70.0))],
        "to(float16)",
        "forward",
        "middle",
        "fp16 overflow",
        {(0, 2)},
    ),
    "fp16 autocast": Fault(
        doubling,
        lambda: [rows((5, 6e4))],
        "addmm",
        "forward",
        "last",
        "layer by layer",
        {(0, 5)},
        in_float16,
    ),
    "custom backward": Fault(
        lambda: Body(Custom()),
        lambda: [rows((8, 3.0))],
        "div",
        "backward",
        "middle",
        "custom backward",
        {(0, 8)},
    ),
    "one-sided where": Fault(
        lambda: Body(OneSidedWhere()),
        lambda: [rows((6, 0.0))],
        "log",
        "backward",
        "middle",
        "one-sided where",
        {(0, 6)},
    ),
    "nothing to attend to": Fault(
        lambda: Body(Masked()),
        lambda: [rows((13, 7.0))],
        "softmax",
        "forward",
        "middle",
        "nothing left to attend to",
        {(0, 13)},
    ),
    "an infinity that was not meant well": Fault(
        lambda: Body(Times()),
        lambda: [rows()],
        "full",
        "forward",
        "middle",
        "infinitely many",
        {(0, row) for row in range(ROWS)},
        summed,
    ),
    "zero times a mask": Fault(
        lambda: Body(ZeroTimes()),
        lambda: [rows((12, 0.0))],
        "mul",
        "forward",
        "middle",
        "zero times infinity",
        {(0, 12)},
    ),
    "minus infinity in the data": Fault(
        bare,
        lambda: [rows((3, -math.inf))],
        "input",
        "before",
        None,
        "calls the model",
        {(0, 3)},
        detail="argument x, row 3",
    ),
    "nan in one sample": Fault(
        bare,
        lambda: [rows((7, math.nan))],
        "input",
        "before",
        None,
        "calls the model",
        {(0, 7)},
        detail="argument x, row 7",
    ),
    "inf in two samples": Fault(
        bare,
        lambda: [rows((3, -math.inf), (5, math.inf))],
        "input",
        "before",
        None,
        "calls the model",
        {(0, 3), (0, 5)},
        detail="argument x, rows 3, 5",
    ),
    "poisoned micro-batch": Fault(
        lambda: Body(Length()),
        lambda: [rows(count=4), rows(count=4), rows((3, 1e30), count=4), rows(count=4)],
        "mul",
        "forward",
        "middle",
        "sqrt at zero",
        {(2, 3)},
    ),
    "nan in a parameter": Fault(
        poisoned_weight,
        lambda: [rows()],
        "parameter",
        "before",
        "last",
        None,
        {(0, row) for row in range(ROWS)},
        detail="last.weight not finite before the pass",
    ),
    "exploding recurrence": Fault(
        lambda: Recurrent(40.0),
        lambda: [rows()],
        "mm",
        "forward",
        "cell",
        "one step of the recurrence",
        {(0, row) for row in range(ROWS)},
    ),
    "exploding backward": Fault(
        lambda: Recurrent(5.0),
        lambda: [rows()],
        "mm",
        "backward",
        "cell",
        "one step of the recurrence",
        {(0, row) for row in range(ROWS)},
        large,
    ),
    "exploding nn.RNN": Fault(
        relu_rnn,
        lambda: [torch.ones(ROWS, 40, WIDTH)],
        "addmm",
        "forward",
        "rnn",
        "reads the sequence",
        {(0, row) for row in range(ROWS)},
    ),
    "checkpointed GPT-2, forward": Fault(
        lambda: gpt2(Logarithm()),
        lambda: [tokens()],
        "log",
        "forward",
        "transformer.h.1.mlp.act",
        "planted in a block",
        GPT2,
        own_loss,
    ),
    "checkpointed GPT-2, backward": Fault(
        lambda: gpt2(Root()),
        lambda: [tokens()],
        "sqrt",
        "backward",
        "transformer.h.1.mlp.act",
        "planted derivative",
        GPT2,
        own_loss,
    ),
    "GPT-2 in its own code": Fault(
        heavy_gpt2,
        lambda: [tokens()],
        "pow",
        "backward",
        "transformer.h.1.mlp.act",
        None,
        GPT2,
        own_loss,
        library="transformers/activations.py",
    ),
    "compiled": Fault(
        lambda: torch.compile(Body(Half()), backend="eager"),
        lambda: [rows((2, 70.0))],
        "to(float16)",
        "forward",
        "middle",
        "fp16 overflow",
        {(0, 2)},
    ),
    "compiled in part": Fault(
        lambda: Body(Half()),
        lambda: [rows((2, 70.0))],
        "to(float16)",
        "forward",
        "middle",
        "fp16 overflow",
        {(0, 2)},
        compiled=compiled_in_part,
    ),
    "compiled in place": Fault(
        lambda: Body(Half()),
        lambda: [rows((2, 70.0))],
        "to(float16)",
        "forward",
        "middle",
        "fp16 overflow",
        {(0, 2)},
        compiled=compiled_in_place,
    ),
}


class Attention(nn.Module):
    """Weights with a mask added to them; the mask is a buffer, an argument, or made on the way."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.kind = mask
        self.register_buffer("hidden", torch.triu(torch.full((5, 5), float("-inf")), 1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.query(x) @ x.transpose(1, 2)
        open_ = torch.ones(5, 5).tril()
        if self.kind == "log":
            scores = scores + open_.log()
        elif self.kind == "fill":
            scores = scores.masked_fill(open_ == 0, float("-inf"))
        elif self.kind == "where":
            scores = torch.where(open_ > 0, scores, torch.tensor(float("-inf")))
        elif self.kind == "float16":
            scores = (scores + (1 - open_) * -1e9).half().float()
        else:
            scores = scores + (self.hidden if mask is None else mask)
        return scores.softmax(-1) @ x


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.norm(self.convolution(x)), (1, 1, 1, 1), value=float("-inf"))
        return F.max_pool2d(x, 2).flatten(1)


class Choice(nn.Module):
    """Logits of which some are forbidden: its outputs hold -inf, and that is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).masked_fill(torch.arange(WIDTH) > 3, float("-inf"))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        padded[0, 3:] = True
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) < 0
        return self.layer(x, src_mask=causal, src_key_padding_mask=padded)


def padded() -> dict[str, Tensor]:
    batch = tokens()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 4:] = 0
    mask[1, :2] = 0
    return {**batch, "attention_mask": mask}


def first_class(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))


def masked_call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, mask=torch.triu(torch.full((5, 5), float("-inf")), 1)).square().mean()


def sequences() -> Tensor:
    return torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(3))


HEALTHY: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[nn.Module, Any], Tensor]]
] = {
    "GPT-2 sdpa": (lambda: gpt2(attn_implementation="sdpa"), padded, own_loss),
    "GPT-2 eager": (
        lambda: gpt2(attn_implementation="eager", checkpointed=False),
        padded,
        own_loss,
    ),
    "encoder layer": (Encoder, sequences, squared),
    **{
        f"mask by {kind}": (lambda kind=kind: Attention(kind), sequences, squared)
        for kind in ("log", "fill", "where", "float16")
    },
    "mask in a buffer": (lambda: Attention("add"), sequences, squared),
    "mask as an argument": (lambda: Attention("add"), sequences, masked_call),
    "pooling": (Pooling, lambda: torch.randn(4, 1, 6, 6), squared),
    "forbidden logits": (Choice, rows, first_class),
    "lstm": (
        lambda: nn.LSTM(WIDTH, WIDTH),
        sequences,
        lambda model, x: model(x)[0].square().mean(),
    ),
}
