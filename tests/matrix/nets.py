"""A tiny model, its data, and what float64 says of its first step."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS, ROWS, LENGTH, WIDTH, CLASSES = 2, 8, 64, 6, 4
LIMIT = 0.1
"""The norm that gradients are clipped to."""
generator = torch.Generator().manual_seed(0)
X = torch.randn(STEPS * ROWS, LENGTH, WIDTH, generator=generator)
Y = torch.randint(CLASSES, (STEPS * ROWS,), generator=generator)
VALIDATION = (
    torch.randn(4, LENGTH, WIDTH, generator=generator),
    torch.randint(CLASSES, (4,), generator=generator),
)

Batch = tuple[Tensor, Tensor]
Gradients = dict[str, Tensor]


class Block(nn.Module):
    """The part that is repeated, and that checkpointing finds."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)).square())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        # A copy: FSDP2 warns of views as results.
        return self.head(x.mean(1)).clone()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y)


def double_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The same for a twin in float64."""
    return nn.functional.cross_entropy(model(batch[0].double()), batch[1])


def rows_of_step(step: int) -> Batch:
    rows = slice(step * ROWS, (step + 1) * ROWS)
    return X[rows], Y[rows]


def single_rows(batch: Batch) -> Iterator[Batch]:
    for row in range(len(batch[0])):
        yield batch[0][row : row + 1], batch[1][row : row + 1]


def gradients_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Gradients:
    """By the names of trainable parameters; the model is left as it was."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss(twin).backward()
    return {
        name: parameter.grad.double()
        for name, parameter in twin.named_parameters()
        if parameter.grad is not None
    }


def scores_of(direction: Gradients, shares: Sequence[Gradients]) -> Tensor:
    """<direction, a sample's share of the gradient>, for every sample."""
    products = [
        sum(float((direction[name] * share[name]).sum()) for name in share) for share in shares
    ]
    return torch.tensor(products, dtype=torch.float64)


def weights_of(model: nn.Module) -> list[Tensor]:
    def whole(parameter: Any) -> Tensor:
        return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter

    return [whole(parameter).detach().clone() for parameter in model.parameters()]
