"""The table of training loops. Each trains a small model on given batches, and says what it expects
before every step.

A loop gets `watched`, which opens a watch (or nothing) on model and optimizers, and `expect`, which
computes the gradient of the step to come with plain autograd in float64 from the weights as they
are.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_imported_by_name
from torch.utils.checkpoint import checkpoint

from gradsight.core.parameters import named_parameters

STEPS = 20
Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass
class Case:
    """What a loop is given."""

    watched: Callable[..., AbstractContextManager[Any]]
    micro_batches: int = 1
    expected: list[dict[str, Tensor]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def steps(self) -> Iterator[list[Batch]]:
        generator = torch.Generator().manual_seed(7)
        for _ in range(STEPS):
            yield [
                (
                    torch.randn(16, 8, generator=generator) * 3,
                    torch.randn(16, 4, generator=generator),
                )
                for _ in range(self.micro_batches)
            ]

    def expect(self, model: nn.Module, batches: list[Batch], loss_of: Loss | None = None) -> None:
        """The gradient of the mean loss over these batches, in float64, by the model's own names."""
        twin = copy.deepcopy(getattr(model, "_orig_mod", model)).double()
        for parameter in twin.parameters():
            parameter.grad = None
        for x, y in batches:
            batch = (x.double() if x.is_floating_point() else x, y.double())
            ((loss_of or mse)(twin, batch) / len(batches)).backward()
        self.expected.append(
            {
                named.name: named.tensor.grad.to_dense()
                if named.tensor.grad.is_sparse
                else named.tensor.grad
                for named in named_parameters(twin)
                if named.tensor.grad is not None
            }
        )

    def done(self, model: nn.Module) -> None:
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]


def mse(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


class Odd(nn.Module):
    """Tied, frozen, unused and zero-dimensional parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.enter.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.frozen(self.again(self.enter(x).tanh()).tanh()) * self.scale)


class Lookup(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].abs().mul(5).long() % 50)


class Checkpointed(nn.Module):
    """Recomputes its blocks in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)


def train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    after_backward: Callable[[nn.Module], None] = lambda model: None,
    loss_of: Loss = mse,
    set_to_none: bool = True,
) -> None:
    """The ordinary loop, with something done between backward and step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with case.watched(model, optimizer):
        for batches in case.steps():
            case.expect(model, batches, loss_of if loss_of is not mse else None)
            for batch in batches:
                (loss_of(model, batch) / len(batches)).backward()
            after_backward(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    case.done(model)


def plain(case: Case) -> None:
    train(case, mlp())


def clip_norm(case: Case) -> None:
    train(
        case,
        mlp(),
        after_backward=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    )


def clip_by_name(case: Case) -> None:
    train(case, mlp(), after_backward=lambda model: clip_imported_by_name(model.parameters(), 0.05))


def clip_value(case: Case) -> None:
    train(
        case,
        mlp(),
        after_backward=lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
    )


def clip_in_two_parts(case: Case) -> None:
    def clip(model: nn.Module) -> None:
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)

    train(case, mlp(), after_backward=clip)


def clip_by_hand(case: Case) -> None:
    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.01, 0.01)

    train(case, mlp(), after_backward=clip)


def clip_into_new_tensors(case: Case) -> None:
    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.25

    train(case, mlp(), after_backward=clip)


def accumulation(case: Case) -> None:
    case.micro_batches = 4
    train(
        case,
        mlp(),
        after_backward=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    )


def zero_grad_to_zero(case: Case) -> None:
    train(case, Odd(), set_to_none=False)


def odd_parameters(case: Case) -> None:
    model = Odd()
    train(
        case, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    )


def sparse(case: Case) -> None:
    model = Lookup()
    train(case, model, torch.optim.SparseAdam(model.parameters(), lr=1e-2))


def fused(case: Case) -> None:
    model = mlp()
    train(case, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def foreach(case: Case) -> None:
    model = mlp()
    train(case, model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))


def lbfgs(case: Case) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with case.watched(model, optimizer):
        for batches in case.steps():
            case.expect(model, batches)

            def closure(batches: list[Batch] = batches) -> Tensor:
                optimizer.zero_grad()
                loss = mse(model, batches[0])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                return loss

            optimizer.step(closure)
    case.done(model)


def closure_by_keyword(case: Case) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, optimizer):
        for batches in case.steps():
            case.expect(model, batches)

            def closure(batches: list[Batch] = batches) -> Tensor:
                optimizer.zero_grad()
                loss = mse(model, batches[0])
                loss.backward()
                return loss

            optimizer.step(closure=closure)
    case.done(model)


def two_optimizers_together(case: Case) -> None:
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    second = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=1e-3)
    with case.watched(model, [first, second]):
        for batches in case.steps():
            case.expect(model, batches)
            mse(model, batches[0]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            first.step()
            second.step()
            model.zero_grad()
    case.done(model)


class Adversaries(nn.Module):
    """Two networks: the second's loss also leaves gradients in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.maker = mlp(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.maker(x))


def two_optimizers_in_turn(case: Case) -> None:
    model = Adversaries()
    critic = torch.optim.SGD(model.critic.parameters(), lr=1e-2)
    maker = torch.optim.SGD(model.maker.parameters(), lr=1e-2)
    with case.watched(model, [critic, maker]):
        for batches in case.steps():
            case.expect(model.critic, batches)
            expected = {f"critic.{name}": value for name, value in case.expected.pop().items()}
            critic.zero_grad()
            mse(model.critic, batches[0]).backward()
            torch.nn.utils.clip_grad_norm_(model.critic.parameters(), 0.05)
            critic.step()
            case.expect(model, batches)
            expected |= {
                name: value
                for name, value in case.expected.pop().items()
                if name.startswith("maker")
            }
            case.expected.append(expected)
            maker.zero_grad()
            mse(model, batches[0]).backward()
            maker.step()
    case.done(model)


def scaler(case: Case) -> None:
    _scaled(case, mlp(), torch.optim.SGD, clip=False)


def scaler_with_clipping(case: Case) -> None:
    _scaled(case, mlp(), torch.optim.SGD, clip=True)


def scaler_fused(case: Case) -> None:
    _scaled(
        case,
        mlp(),
        lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
        clip=False,
    )


def scaler_skipping(case: Case) -> None:
    _scaled(case, mlp(), torch.optim.SGD, clip=True, overflow_at=(3, 4, 11))


def scaler_fused_skipping(case: Case) -> None:
    _scaled(
        case,
        mlp(),
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, fused=True),
        clip=False,
        overflow_at=(3, 11),
    )


def _scaled(
    case: Case,
    model: nn.Module,
    make: Callable[..., Any],
    clip: bool,
    overflow_at: tuple[int, ...] = (),
) -> None:
    optimizer = make(model.parameters(), lr=1e-3)
    amp = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=5)
    with case.watched(model, optimizer):
        for step, batches in enumerate(case.steps()):
            if step in overflow_at:
                case.skipped.append(step)
                batches = [(x, y * 1e38) for x, y in batches]
            case.expect(model, batches)
            amp.scale(mse(model, batches[0])).backward()
            if clip:
                amp.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            amp.step(optimizer)
            amp.update()
            optimizer.zero_grad()
    case.done(model)


def autocast(case: Case) -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        if batch[0].dtype is torch.float64:
            return mse(model, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch[0])
        return (out.float() - batch[1]).square().mean()

    train(case, mlp(), loss_of=loss_of)


def compiled(case: Case) -> None:
    model = torch.compile(mlp(), backend="aot_eager")
    train(
        case,
        model,
        after_backward=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    )


def checkpointed(case: Case) -> None:
    train(case, Checkpointed(reentrant=False))


def checkpointed_reentrant(case: Case) -> None:
    train(case, Checkpointed(reentrant=True))


def optimizer_in_backward(case: Case) -> None:
    model = mlp()
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=1e-2) for parameter in model.parameters()
    }

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with case.watched(model, list(optimizers.values())):
        for batches in case.steps():
            case.expect(mlp_like(model), batches)
            mse(model, batches[0]).backward()
    case.done(model)


def mlp_like(model: nn.Module) -> nn.Module:
    """The same weights without the hooks."""
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    return twin


def by_hand(case: Case) -> None:
    """No watched optimizer: the loop says when."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, None) as watch:
        for batches in case.steps():
            case.expect(model, batches)
            mse(model, batches[0]).backward()
            if watch is not None:
                watch.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    case.done(model)


def by_hand_scaled(case: Case) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    with case.watched(model, None) as watch:
        for step, batches in enumerate(case.steps()):
            case.expect(model, batches)
            amp.scale(mse(model, batches[0])).backward()
            if step % 2:
                amp.unscale_(optimizer)
            if watch is not None:
                watch.step()
            amp.step(optimizer)
            amp.update()
            optimizer.zero_grad()
    case.done(model)


TRUTHFUL = [
    plain,
    clip_norm,
    clip_by_name,
    clip_value,
    clip_in_two_parts,
    clip_by_hand,
    clip_into_new_tensors,
    accumulation,
    zero_grad_to_zero,
    odd_parameters,
    sparse,
    fused,
    foreach,
    lbfgs,
    closure_by_keyword,
    two_optimizers_together,
    two_optimizers_in_turn,
    scaler,
    scaler_with_clipping,
    scaler_fused,
    scaler_skipping,
    scaler_fused_skipping,
    autocast,
    compiled,
    checkpointed,
    checkpointed_reentrant,
    optimizer_in_backward,
    by_hand,
    by_hand_scaled,
]
