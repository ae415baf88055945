"""Training runs with one bad step each. The golden results name lines of this file.

Add new runs at the end, so that the numbers of the other lines stay the same.
"""

import torch
from torch import Tensor, nn

ROWS, WIDTH, BAD_STEP, STEPS = 8, 4, 20, 22


class Scale(nn.Module):
    """Divides by the length of a row; the derivative of a root at zero is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        squares = (x * x).sum(-1, keepdim=True)
        return x + squares.sqrt()


class Logarithm(nn.Module):
    """Takes the logarithm of something that may become zero."""

    def forward(self, x: Tensor) -> Tensor:
        positive = x.exp()
        return positive.log()


class Half(nn.Module):
    """Rounds to float16, which ends at 65504."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half().double()


class Reciprocal(torch.autograd.Function):
    """The identity, with a backward function that divides by the input."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / x


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reciprocal.apply(x)


def body(middle: nn.Module) -> nn.Module:
    """Build a model whose first layer is the identity at the start."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), middle, nn.Linear(WIDTH, 1))
    nn.init.eye_(model[0].weight)
    return model


def rows(step: int) -> Tensor:
    """Return the inputs of a step: numbers near 1, the same for every run."""
    generator = torch.Generator().manual_seed(step)
    return torch.rand(ROWS, WIDTH, generator=generator) + 0.5


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def log_of_output(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x).square()
    kept = output * (x[:, :1] < 50)
    return -kept.log().mean()


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    """Give each row a weight; one row of a spike has a large one."""
    weights = torch.where(x[:, 0] > 50, 500.0, 1.0)
    losses = (model(x.clamp(max=2)) - 1).square().mean(1)
    return (losses * weights).mean()


RUNS = {
    # name: middle of the model, loss, changed rows and their value at the bad step
    "infinite input": (nn.Identity, squared, {5: float("inf")}),
    "NaN in two rows": (nn.Tanh, squared, {2: float("nan"), 6: float("nan")}),
    "root at zero": (Scale, squared, {3: 0.0}),
    "logarithm of zero": (Logarithm, squared, {1: -2000.0}),
    "overflow in float16": (Half, squared, {7: 90_000.0}),
    "custom backward": (Custom, squared, {4: 0.0}),
    "logarithm in the loss": (nn.Identity, log_of_output, {6: 60.0}),
    "spike": (nn.Tanh, weighted, {2: 60.0}),
}
"""Runs by name."""
