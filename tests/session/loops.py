"""The table of training loops. Each trains a small model on given batches, and says what it expects
before every step.

A loop gets `watched`, which opens a watch (or nothing) on model and optimizers, and `expect`, which
computes the gradient of the step to come with plain autograd in float64 from the weights as they
are.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_imported_by_name
from torch.utils.checkpoint import checkpoint

import gradsight

STEPS = 20
Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass
class Case:
    """What a loop is given."""

    watched: Callable[..., AbstractContextManager[Any]]
    micro_batches: int = 1
    device: torch.device | str = "cpu"
    on_cpu: Callable[[nn.Module], nn.Module] = lambda twin: twin
    expected: list[dict[str, Tensor]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def steps(self) -> Iterator[list[Batch]]:
        generator = torch.Generator().manual_seed(7)
        for _ in range(STEPS):
            yield [
                (
                    torch.randn(16, 8, generator=generator, device="cpu").to(self.device) * 3,
                    torch.randn(16, 4, generator=generator, device="cpu").to(self.device),
                )
                for _ in range(self.micro_batches)
            ]

    def expect(self, model: nn.Module, batches: list[Batch], loss_of: Loss | None = None) -> None:
        """The gradient of the mean loss over these batches, in float64, by the model's own names."""
        twin = self.on_cpu(copy.deepcopy(getattr(model, "_orig_mod", model))).double()
        for parameter in twin.parameters():
            parameter.grad = None
        for x, y in batches:
            x, y = x.cpu(), y.cpu()
            batch = (x.double() if x.is_floating_point() else x, y.double())
            ((loss_of or mse)(twin, batch) / len(batches)).backward()
        self.expected.append(
            {
                name: parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                for name, parameter in twin.named_parameters()
                if parameter.grad is not None
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


# Other backward passes between clipping and the step.


class Between:
    """What else is done between clipping and the step, with a model of its own."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(4, 8)

    def train(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def clip(parameters: Any) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.05)


def another_model_between(case: Case) -> None:
    between = Between()

    def after_backward(model: nn.Module) -> None:
        clip(model.parameters())
        between.train()

    train(case, mlp(), after_backward=after_backward)


def another_model_between_micro_batches(case: Case) -> None:
    case.micro_batches = 3
    between = Between()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        if batch[0].dtype is not torch.float64:
            between.train()
        return mse(model, batch)

    train(case, mlp(), after_backward=lambda model: clip(model.parameters()), loss_of=loss_of)


def backward_to_inputs_between(case: Case) -> None:
    """A saliency map of the model itself: no parameter is written."""

    def after_backward(model: nn.Module) -> None:
        clip(model.parameters())
        x = torch.ones(2, 8, requires_grad=True)
        model(x).sum().backward(inputs=[x])

    train(case, mlp(), after_backward=after_backward)


def autograd_grad_between(case: Case) -> None:
    def after_backward(model: nn.Module) -> None:
        clip(model.parameters())
        torch.autograd.grad(model(torch.ones(2, 8)).sum(), list(model.parameters()))

    train(case, mlp(), after_backward=after_backward)


def teacher_and_student(case: Case) -> None:
    """The teacher is trained between the student's clipping and its step."""
    torch.manual_seed(2)
    teacher = mlp()
    teaching = torch.optim.SGD(teacher.parameters(), lr=1e-2)
    student = mlp()
    learning = torch.optim.SGD(student.parameters(), lr=1e-2)

    def distilled(model: nn.Module, batch: Batch) -> Tensor:
        guide = copy.deepcopy(teacher).to(batch[0].dtype)
        with torch.no_grad():
            wanted = guide(batch[0])
        return (model(batch[0]) - wanted - batch[1]).square().mean()

    with case.watched(student, learning):
        for batches in case.steps():
            case.expect(student, batches, distilled)
            distilled(student, batches[0]).backward()
            clip(student.parameters())
            teaching.zero_grad()
            mse(teacher, batches[0]).backward()
            teaching.step()
            learning.step()
            learning.zero_grad()
    case.done(student)


def retain_graph(case: Case) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, optimizer):
        for batches in case.steps():
            case.expect(model, batches, lambda model, batch: 2 * mse(model, batch))
            loss = mse(model, batches[0])
            loss.backward(retain_graph=True)
            loss.backward()
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    case.done(model)


def gradient_penalty(case: Case) -> None:
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].detach().requires_grad_()
        loss = mse(model, (x, batch[1]))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    train(case, mlp(), after_backward=lambda model: clip(model.parameters()), loss_of=loss_of)


def penalty_in_a_pass_of_its_own(case: Case) -> None:
    """The penalty's backward adds to gradients that nobody has touched."""

    def penalty(model: nn.Module) -> Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, optimizer):
        for batches in case.steps():
            case.expect(model, batches, lambda model, batch: mse(model, batch) + penalty(model))
            mse(model, batches[0]).backward()
            penalty(model).backward()
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    case.done(model)


class TwoHeads(nn.Module):
    """Two losses: each reaches the trunk and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 8)
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 4)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, y = batch
        hidden = self.trunk(x).tanh()
        return (self.first(hidden) - y).square().mean(), (self.second(hidden) + y).square().mean()

    def both(self, batch: Batch) -> Tensor:
        first, second = self.losses(batch)
        return first + second


def two_losses(case: Case) -> None:
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, optimizer):
        for batches in case.steps():
            case.expect(model, batches, TwoHeads.both)
            first, second = model.losses(batches[0])
            first.backward(retain_graph=True)
            second.backward()
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    case.done(model)


class TwoHalves(nn.Module):
    """Two networks that share nothing but the optimizers' rhythm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), nn.Linear(8, 4)

    def both(self, batch: Batch) -> Tensor:
        return mse(self.first, batch) + mse(self.second, batch)


def each_half_clipped_when_it_has_its_gradient(case: Case) -> None:
    _halves(case, two_optimizers=True)


def each_half_clipped_under_one_optimizer(case: Case) -> None:
    _halves(case, two_optimizers=False)


def _halves(case: Case, two_optimizers: bool) -> None:
    model = TwoHalves()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=1e-2)]
    if two_optimizers:
        halves = (model.first, model.second)
        optimizers = [torch.optim.SGD(half.parameters(), lr=1e-2) for half in halves]
    with case.watched(model, optimizers):
        for batches in case.steps():
            case.expect(model, batches, TwoHalves.both)
            mse(model.first, batches[0]).backward()
            clip(model.first.parameters())
            mse(model.second, batches[0]).backward()
            clip(model.second.parameters())
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    case.done(model)


def adversaries_both_clipped(case: Case) -> None:
    _adversaries(case, set_to_none=True)


def adversaries_zeroed_in_place(case: Case) -> None:
    """What the maker's loss left in the critic is zeroed, not taken away."""
    _adversaries(case, set_to_none=False)


def _adversaries(case: Case, set_to_none: bool) -> None:
    model = Adversaries()
    critic = torch.optim.SGD(model.critic.parameters(), lr=1e-2)
    maker = torch.optim.SGD(model.maker.parameters(), lr=1e-2)
    with case.watched(model, [critic, maker]):
        for batches in case.steps():
            case.expect(model.critic, batches)
            expected = {f"critic.{name}": value for name, value in case.expected.pop().items()}
            critic.zero_grad(set_to_none=set_to_none)
            mse(model.critic, batches[0]).backward()
            clip(model.critic.parameters())
            critic.step()
            case.expect(model, batches)
            made = case.expected.pop().items()
            expected |= {name: value for name, value in made if name.startswith("maker")}
            case.expected.append(expected)
            maker.zero_grad(set_to_none=set_to_none)
            mse(model, batches[0]).backward()
            clip(model.maker.parameters())
            maker.step()
    case.done(model)


def adversaries_step_together(case: Case) -> None:
    """The critic is clipped, and the maker's loss leaves it alone: both step afterwards."""
    model = Adversaries()
    critic = torch.optim.SGD(model.critic.parameters(), lr=1e-2)
    maker = torch.optim.SGD(model.maker.parameters(), lr=1e-2)
    with case.watched(model, [critic, maker]):
        for batches in case.steps():
            case.expect(model.critic, batches)
            expected = {f"critic.{name}": value for name, value in case.expected.pop().items()}
            case.expect(model, batches)
            made = case.expected.pop().items()
            expected |= {name: value for name, value in made if name.startswith("maker")}
            case.expected.append(expected)
            mse(model.critic, batches[0]).backward()
            clip(model.critic.parameters())
            mse(model, batches[0]).backward(inputs=list(model.maker.parameters()))
            clip(model.maker.parameters())
            critic.step()
            maker.step()
            model.zero_grad()
    case.done(model)


def several_watches(case: Case) -> None:
    """Another model with a watch of its own takes turns, and this one is watched twice."""
    other = mlp()
    others = torch.optim.SGD(other.parameters(), lr=1e-2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        gradsight.watch(other, others, quiet=True),
        gradsight.watch(model, optimizer, quiet=True),
        case.watched(model, optimizer),
    ):
        for batches in case.steps():
            case.expect(model, batches)
            mse(model, batches[0]).backward()
            clip(model.parameters())
            (2 * mse(other, batches[0])).backward()
            clip(other.parameters())
            optimizer.step()
            others.step()
            optimizer.zero_grad()
            others.zero_grad()
    case.done(model)


def scaler_with_another_backward(case: Case) -> None:
    """Unscaled and clipped; then another model's loss is scaled by the same scaler."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    between = Between()
    with case.watched(model, optimizer):
        for batches in case.steps():
            case.expect(model, batches)
            amp.scale(mse(model, batches[0])).backward()
            amp.unscale_(optimizer)
            clip(model.parameters())
            amp.scale(between.model(between.x).square().mean()).backward()
            amp.step(optimizer)
            amp.step(between.optimizer)
            amp.update()
            optimizer.zero_grad()
            between.optimizer.zero_grad()
    case.done(model)


def backward_that_fails(case: Case) -> None:
    """It has written some gradients; the loop clears them and tries once more."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise MemoryError

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, optimizer):
        for batches in case.steps():
            case.expect(model, batches)
            x, y = batches[0]
            with contextlib.suppress(MemoryError):
                (model[2:](Fails.apply(model[:2](x))) - y).square().mean().backward()
            optimizer.zero_grad()
            mse(model, batches[0]).backward()
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    case.done(model)


def thawed_later(case: Case) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with case.watched(model, optimizer):
        for number, batches in enumerate(case.steps()):
            model[0].requires_grad_(number >= STEPS // 2)
            case.expect(model, batches)
            mse(model, batches[0]).backward()
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    case.done(model)


def thread_beside(case: Case) -> None:
    """Another thread trains a model that nobody watches."""
    ended = threading.Event()
    between = Between()  # here: what is drawn in a thread beside, all threads' generator draws

    def train_on() -> None:
        while not ended.is_set():
            between.train()

    beside = threading.Thread(target=train_on)
    beside.start()
    try:
        train(case, mlp(), after_backward=lambda model: clip(model.parameters()))
    finally:
        ended.set()
        beside.join()


def trained_in_a_thread(case: Case) -> None:
    """Every step is made by another thread."""
    case.micro_batches = 2
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(batches: list[Batch]) -> None:
        case.expect(model, batches)
        for batch in batches:
            (mse(model, batch) / len(batches)).backward()
        clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    with case.watched(model, optimizer):
        for batches in case.steps():
            thread = threading.Thread(target=step, args=(batches,))
            thread.start()
            thread.join()
    case.done(model)


TRUTHFUL = [
    plain,
    clip_norm,
    clip_by_name,
    clip_value,
    clip_in_two_parts,
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
    another_model_between,
    another_model_between_micro_batches,
    backward_to_inputs_between,
    autograd_grad_between,
    teacher_and_student,
    retain_graph,
    gradient_penalty,
    penalty_in_a_pass_of_its_own,
    two_losses,
    each_half_clipped_when_it_has_its_gradient,
    each_half_clipped_under_one_optimizer,
    adversaries_both_clipped,
    adversaries_zeroed_in_place,
    adversaries_step_together,
    several_watches,
    scaler_with_another_backward,
    backward_that_fails,
    thawed_later,
    thread_beside,
    trained_in_a_thread,
]


# A backward pass adds to what was clipped already: what is recorded is what the optimizer gets.


def _added_to(
    case: Case, edit: Callable[[nn.Module], None], scaler: torch.amp.GradScaler | None = None
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with case.watched(model, optimizer):
        for batches in case.steps():
            loss = mse(model, batches[0])
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            edit(model)
            loss = model(batches[0][0]).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            case.expected.append({n: p.grad.clone() for n, p in model.named_parameters()})
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    case.done(model)


def added_to_clipped(case: Case) -> None:
    _added_to(case, lambda model: clip(model.parameters()))


def added_to_clipped_again(case: Case) -> None:
    """A third pass, to which nothing was done in between, does not make it true."""

    def edit(model: nn.Module) -> None:
        clip(model.parameters())
        model(torch.ones(2, 8)).sum().backward()

    _added_to(case, edit)


def added_to_new_tensors(case: Case) -> None:
    def edit(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.25

    _added_to(case, edit)


def added_to_unscaled(case: Case) -> None:
    amp = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    _added_to(case, lambda model: clip(model.parameters()), amp)


def adversary_added_to(case: Case) -> None:
    """The critic is clipped, then the maker's loss adds to it: both step afterwards."""
    model = Adversaries()
    critic = torch.optim.SGD(model.critic.parameters(), lr=1e-2)
    maker = torch.optim.SGD(model.maker.parameters(), lr=1e-2)
    with case.watched(model, [critic, maker]):
        for batches in case.steps():
            mse(model.critic, batches[0]).backward()
            clip(model.critic.parameters())
            mse(model, batches[0]).backward()
            case.expected.append({n: p.grad.clone() for n, p in model.named_parameters()})
            critic.step()
            maker.step()
            model.zero_grad()
    case.done(model)


CHANGED = [
    added_to_clipped,
    added_to_clipped_again,
    added_to_new_tensors,
    added_to_unscaled,
    adversary_added_to,
]
