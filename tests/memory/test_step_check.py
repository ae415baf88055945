"""apply_checkpointing(check=batch): both steps compared beside training, and no trace of them."""

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradsight import apply_checkpointing
from gradsight.errors import GradsightError, UsageError

GENERATOR = torch.Generator()
WIDTH = 8


class Plain(nn.Module):
    """A block that is the same whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.drop(self.layer(x))) * self.factor(x)

    def factor(self, x: torch.Tensor) -> Any:
        return 1.0


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape, generator=self.generator)


class GlobalGenerator(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * torch.rand(x.shape, generator=GENERATOR)


class Numpy(Plain):
    """Has a generator of its own as well, which is innocent."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.random.rand(*x.shape)).float()


class Unseeded(Plain):
    """Another number each time, which no seed repeats."""

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng().random(x.shape)).float()


class PythonsRandom(Plain):
    def factor(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, random.random())


class Counting(Plain):
    """Keeps state in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.full_like(x, 1.0 / self.calls)


class Remembering(Plain):
    """Keeps state in containers, and in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"sums": [], "mean": np.zeros(1)}
        self.total = torch.zeros(WIDTH)

    def factor(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["sums"].append(1)
        self.seen["mean"] += 1
        self.total.add_(1)
        return self.total * len(self.seen["sums"])


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Branching(Plain):
    """Runs other operators the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = super().forward(x)
        return out.exp() * out if self.calls % 2 else out


class WritesToItsInput(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.layer(torch.sin(x))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def stack(guilty: type[Plain]) -> nn.Module:
    """Four blocks, the third of which may be guilty; a linear layer in front of them."""
    kinds = (Plain, Plain, guilty, Plain)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for kind in kinds))


BLOCKS = ["1", "2", "3", "4"]
GUILTY = (
    (OwnGenerator, "own generator: 3.generator"),
    (GlobalGenerator, "own generator: GENERATOR"),
    (Numpy, "numpy randomness"),
    (Unseeded, ""),
    (PythonsRandom, "Python's random randomness"),
    (Counting, "state that its forward changes"),
    (Remembering, "state that its forward changes"),
    (Normed, "BatchNorm statistics: 3.norm"),
    (Branching, "runs other operations the second time"),
)


@pytest.mark.parametrize(
    ("kind", "cause"), GUILTY, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_guilty_block_is_named_and_nothing_is_applied(kind: type[Plain], cause: str) -> None:
    model = stack(kind)
    batch = torch.randn(6, WIDTH)
    before = state_of(model)
    with pytest.raises(
        GradsightError, match=rf"The block '3' \({kind.__name__}\) is not the same"
    ) as error:
        apply_checkpointing(model, blocks=BLOCKS, check=batch, loss_fn=loss)
    assert cause in str(error.value)
    assert not any("forward" in vars(m) for m in model.modules())
    assert state_of(model) == before


def test_a_write_to_the_input_is_named() -> None:
    model = stack(WritesToItsInput)
    with pytest.raises(GradsightError, match=r"the block '3' \(WritesToItsInput\) writes in place"):
        apply_checkpointing(model, blocks=BLOCKS, check=torch.randn(6, WIDTH), loss_fn=loss)
    assert not any("forward" in vars(m) for m in model.modules())


def state_of(model: nn.Module) -> list[Any]:
    """All that a check must leave as it was, to be compared."""
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [
        [tensor.detach().numpy().tobytes() for tensor in tensors],
        [None if g is None else (id(g), g.numpy().tobytes()) for g in gradients],
        [id(tensor) for tensor in tensors],
        [module.training for module in model.modules()],
        [getattr(module, "calls", None) for module in model.modules()],
        [str(getattr(module, "seen", None)) for module in model.modules()],
        [str(getattr(module, "total", None)) for module in model.modules()],
        torch.get_rng_state().tolist(),
        pickle.dumps(np.random.get_state()),
        random.getstate(),
        GENERATOR.get_state().tolist(),
        [m.generator.get_state().tolist() for m in model.modules() if hasattr(m, "generator")],
    ]


@pytest.mark.parametrize("training", [True, False])
def test_a_check_leaves_no_trace(training: bool) -> None:
    model = nn.Sequential(*(Plain() for _ in range(3)))
    model.train(training)
    stepped: list[int] = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda _: stepped.append(1))
        parameter.register_hook(lambda _: stepped.append(2))
    batch = torch.randn(6, WIDTH)
    kept = batch.clone()
    before = state_of(model)
    handle = apply_checkpointing(model, "selective", check=batch, loss_fn=loss)
    assert handle.modes == {"0": "selective", "1": "selective", "2": "selective"}
    assert state_of(model) == before
    assert torch.equal(batch, kept)
    assert not stepped


def test_the_batch_is_taken_as_build_returns_it() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    handle = apply_checkpointing(model, check={"input_ids": tokens, "labels": tokens})
    assert len(handle.modes) == 2


def test_wrong_usage() -> None:
    model = nn.Sequential(*(Plain() for _ in range(3)))
    with pytest.raises(UsageError, match="give check=batch as well"):
        apply_checkpointing(model, loss_fn=loss)
    with pytest.raises(UsageError, match="a function"):
        apply_checkpointing(model, check=torch.randn(2, WIDTH), loss_fn=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="next\\(iter"):
        apply_checkpointing(model, check=iter([]), loss_fn=loss)
    assert not any("forward" in vars(m) for m in model.modules())
