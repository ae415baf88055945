"""A table of training loops, each with an independent truth for every number of its record.

A loop trains a tiny model. `watched` opens a watch, or nothing, on a model and its optimizers. The
loop notes in `truth`, with float64 clones, the gradient that belongs in the record and the gradient
that the optimizer used; the clip coefficient follows from the two.

Called as a script (record_loops.py FOLDER NAME ...), it runs each of these loops in a forked process
that Gradsight is attached to as `gradsight run` does it.
"""

import copy
import json
import math
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, AdamW

STEPS = 4
TRUE = "true"
LATE = "at the optimizer"
BETWEEN = "changed between backward passes"
EDITED = "changed after backward"
HOOKED = "after hooks on parameters"
NONE = "none seen"

Batch = tuple[Tensor, Tensor]
Watched = Callable[..., AbstractContextManager[Any]]


# The truth.


@dataclass
class Expected:
    """One step as it has to be recorded."""

    norms: dict[str, float]
    clip: float | None
    """What the optimizer used, divided by the gradient; None where that is not one number."""
    lr: float | None
    loss: float | None

    @property
    def total(self) -> float:
        return math.hypot(*self.norms.values())


@dataclass
class Truth:
    """What a loop has noted."""

    steps: list[Expected] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    _gradients: dict[str, Tensor] = field(default_factory=dict)
    _used: dict[str, Tensor] = field(default_factory=dict)

    def gradient(self, model: nn.Module, scale: float = 1.0, start: str = "") -> None:
        """The gradient that belongs in the record is here now, of parameters named `start...`."""
        self._gradients.update(_clones(model, scale, start))

    def used(self, model: nn.Module, scale: float = 1.0, start: str = "") -> None:
        """An optimizer is about to use these gradients."""
        self._used.update(_clones(model, scale, start))

    def step(self, lr: object = None, loss: object = None) -> None:
        """The step is made."""
        clip = one_factor(self._gradients, self._used)
        norms = {name: norm(each) for name, each in self._gradients.items()}
        self.steps.append(Expected(norms, clip, _number(lr), _number(loss)))
        self._gradients, self._used = {}, {}

    def done(self, model: nn.Module) -> None:
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]

    def has_same_weights(self, other: "Truth") -> bool:
        """Whether training ended with the same weights, bit for bit."""
        pairs = zip(self.weights, other.weights, strict=True)
        # By bytes: a NaN is equal to itself here.
        return all(
            torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            for a, b in pairs
        )


def _clones(model: nn.Module, scale: float, start: str) -> dict[str, Tensor]:
    wide = {True: torch.complex128, False: torch.float64}
    return {
        name.removeprefix("_orig_mod."): parameter.grad.detach().to(wide[parameter.is_complex()])
        / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and name.startswith(start)
    }


def norm(gradient: Tensor) -> float:
    """The L2 norm, also where squares overflow or vanish."""
    peak = float(gradient.abs().max()) if gradient.numel() else 0.0
    return peak * float((gradient / peak).norm()) if 0.0 < peak < math.inf else peak


def _number(value: object) -> float | None:
    return None if value is None else float(value.detach() if isinstance(value, Tensor) else value)


def one_factor(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float | None:
    """The number that turns each of these gradients into the other, if there is one."""
    largest = max(before, key=lambda name: norm(before[name]), default=None)
    if largest is None or before.keys() != after.keys():
        return None
    if not all(map(math.isfinite, map(norm, [*before.values(), *after.values()]))):
        return None
    if norm(before[largest]) == 0.0:
        return None
    factor = norm(after[largest]) / norm(before[largest])
    close = partial(torch.allclose, rtol=1e-4, atol=1e-7 * norm(after[largest]))
    return (
        factor if all(close(each * factor, after[name]) for name, each in before.items()) else None
    )


@dataclass(frozen=True)
class Loop:
    """An entry of the table."""

    name: str
    train: Callable[[Truth, Watched], None]
    label: str | tuple[str, ...] = TRUE
    """Of every step, or of each."""
    has_clip: bool = True
    """Whether the record has a clip coefficient where there is one; else it is absent."""
    missing: int = 0
    """Steps at the end that an explicit watch does not see, and says so."""
    problems: tuple[str, ...] = ()
    run_label: str | tuple[str, ...] | None = None
    """The label under `gradsight run`, where it is another."""
    run_missing: int = 0
    run_clip_missing: int = 0
    """Steps at the beginning whose clip coefficient `gradsight run` does not know."""
    only_watch: bool = False
    """Whether the loop has no meaning under `gradsight run`."""

    def labels(self, steps: int, under_run: bool = False) -> list[str]:
        label = (self.run_label if under_run else None) or self.label
        return [label] * steps if isinstance(label, str) else list(label)


LOOPS: list[Loop] = []


def loop(**entry: Any) -> Callable[[Any], Any]:
    """Enter a loop of its own into the table."""

    def enter(train: Callable[[Truth, Watched], None]) -> Callable[[Truth, Watched], None]:
        LOOPS.append(Loop(train.__name__, train, **entry))
        return train

    return enter


# The common loop, and what variants put into it.


def mlp(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def data(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0] * 3), batch[1])


def sgd(model: nn.Module, lr: float = 0.1) -> SGD:
    return SGD(model.parameters(), lr=lr)


def halves(model: nn.Module) -> list[SGD]:
    return [SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.05)]


def nothing(*_: Any) -> None:
    """Do nothing."""


def train(
    truth: Truth,
    watched: Watched,
    *,
    model: Callable[[], nn.Module] = mlp,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Callable[[nn.Module, Batch], Tensor] = loss_of,
    micro: int = 1,
    begin: Callable[[nn.Module, torch.optim.Optimizer, int], object] = nothing,
    edit: Callable[[nn.Module], object] = nothing,
    clip: Callable[[nn.Module], object] = nothing,
    log_early: Callable[[Any, Tensor], object] = nothing,
    log: Callable[[Any, Tensor, nn.Module], object] | None = None,
    end: Callable[[nn.Module, torch.optim.Optimizer, int], object] = nothing,
    clear: Callable[[torch.optim.Optimizer], object] = lambda optimizer: optimizer.zero_grad(),
) -> None:
    """The ordinary loop. `edit` works by hand after backward, `clip` by torch's functions."""
    net = model()
    optimizer = make(net)
    with watched(net, optimizer) as watch:
        for step in range(STEPS):
            begin(net, optimizer, step)
            for part in range(micro):
                value = loss(net, data(10 * step + part))
                value.backward()
            log_early(watch, value)
            edit(net)
            truth.gradient(net)
            clip(net)
            truth.used(net)
            lr = optimizer.param_groups[0]["lr"]
            logged = value if log or log_early is not nothing else None
            truth.step(float(lr), logged)
            optimizer.step()
            clear(optimizer)
            if log is not None:
                log(watch, value, net)
            end(net, optimizer, step)
    truth.done(net)


def variant(
    name: str, label: str | tuple[str, ...] = TRUE, *, entry: Any = None, **parts: Any
) -> None:
    """Enter the ordinary loop with these parts into the table."""
    LOOPS.append(Loop(name, partial(train, **parts), label, **(entry or {})))


def each(edit: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], None]:
    """An edit of every parameter's gradient in place."""

    def edit_all(model: nn.Module) -> None:
        for parameter in model.parameters():
            edit(parameter)

    return edit_all


def replaced(new: Callable[[nn.Parameter], Tensor]) -> Callable[[nn.Module], None]:
    """An edit that puts another tensor in the place of every gradient."""

    def put(parameter: nn.Parameter) -> None:
        parameter.grad = new(parameter)

    return each(put)


def by_norm(model: nn.Module, limit: float = 0.05) -> None:
    clip_grad_norm_(model.parameters(), limit)


variant("plain")
variant("gradients_set_to_zero", clear=lambda optimizer: optimizer.zero_grad(set_to_none=False))
variant("never_cleared", clear=nothing)
variant("accumulation", micro=3)
variant("accumulation_clipped", micro=3, clip=by_norm)
variant("adamw_fused", make=lambda model: AdamW(model.parameters(), lr=1e-3, fused=True))
variant("momentum", make=lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9))
variant("ppo_epochs", end=lambda model, optimizer, step: model(data(step)[0]).detach())


# A. Where the loss is logged.


def exponential(watch: Any, loss: Tensor, model: nn.Module) -> None:
    loss.exp()
    watch.log(loss=loss)


def softmax(watch: Any, loss: Tensor, model: nn.Module) -> None:
    model(data(0)[0]).softmax(1)
    watch.log(loss=loss.item())


def weight_norms(watch: Any, loss: Tensor, model: nn.Module) -> None:
    sum(parameter.norm() for parameter in model.parameters())
    watch.log(loss=loss.detach())


def average_with_graph(watch: Any, loss: Tensor, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter * 0.1 + parameter.detach() * 0.9
    watch.log(loss=loss)


def validated(watch: Any, loss: Tensor, model: nn.Module) -> None:
    watch.log(validation=loss_of(model, data(99)), loss=loss)


def validated_without_graph(watch: Any, loss: Tensor, model: nn.Module) -> None:
    with torch.no_grad():
        watch.log(validation=loss_of(model, data(99)))
    watch.log(loss=loss)


variant("logged_before_the_step", log_early=lambda watch, loss: watch.log(loss=loss))
variant("logged_after_the_step", log=lambda watch, loss, model: watch.log(loss=loss.item()))
variant("logged_with_its_graph", log=lambda watch, loss, model: watch.log(loss=loss))
variant("logged_multiplied", log=lambda watch, loss, model: watch.log(loss=loss / 4 * 4))
variant("logged_after_an_exponential", log=exponential)
variant("logged_after_a_softmax", log=softmax)
variant("logged_after_norms_of_weights", log=weight_norms)
variant("logged_after_an_average_with_graph", log=average_with_graph)
variant("logged_with_validation", log=validated)
variant("logged_after_validation_without_graph", log=validated_without_graph)
variant(
    "logged_under_accumulation", micro=3, log=lambda watch, loss, model: watch.log(loss=loss * 1)
)


@loop()
def logged_running_mean(truth: Truth, watched: Watched) -> None:
    model = mlp()
    optimizer = sgd(model)
    mean: Any = 0.0
    with watched(model, optimizer) as watch:
        for step in range(STEPS):
            loss = loss_of(model, data(step))
            mean = 0.9 * mean + 0.1 * loss
            loss.backward(retain_graph=True)
            truth.gradient(model)
            truth.used(model)
            truth.step(0.1, mean)
            optimizer.step()
            optimizer.zero_grad()
            mean = mean.detach() * torch.ones(1, requires_grad=True)
            watch.log(loss=mean)
    truth.done(model)


@loop()
def logged_before_backward(truth: Truth, watched: Watched) -> None:
    model = mlp()
    optimizer = sgd(model)
    with watched(model, optimizer) as watch:
        for step in range(STEPS):
            loss = loss_of(model, data(step))
            watch.log(loss=loss)
            loss.backward()
            truth.gradient(model)
            truth.used(model)
            truth.step(0.1, loss)
            optimizer.step()
            optimizer.zero_grad()
    truth.done(model)


# Clipping by torch's functions, and by one value by hand.


def by_value(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), 0.01)


def with_known_norm(model: nn.Module) -> None:
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)


def twice(model: nn.Module) -> None:
    by_norm(model, 0.05)
    by_norm(model, 0.01)


def value_then_norm(model: nn.Module) -> None:
    by_value(model)
    by_norm(model)


def parts_apart(model: nn.Module) -> None:
    clip_grad_norm_(model[0].parameters(), 0.01)
    clip_grad_norm_(model[2].parameters(), 0.02)


variant("clipped", clip=by_norm)
variant("clipped_above_the_norm", clip=partial(by_norm, limit=1e6))
variant("clipped_twice", clip=twice)
variant("clipped_by_largest_entry", clip=lambda m: clip_grad_norm_(m.parameters(), 0.01, math.inf))
variant("clipped_with_known_norm", clip=with_known_norm)
variant("clipped_by_value", clip=by_value)
variant("clipped_by_value_then_norm", clip=value_then_norm)
variant("clipped_each_parameter", clip=each(lambda p: clip_grad_norm_([p], 0.01)))
variant("clipped_parts_apart", clip=parts_apart)
variant("clipped_first_layer_only", clip=lambda m: clip_grad_norm_(m[0].parameters(), 0.01))
variant("clipped_last_layer_only", clip=lambda m: clip_grad_norm_(m[2].parameters(), 0.01))
variant("clamped_by_hand", EDITED, edit=each(lambda p: p.grad.data.clamp_(-0.01, 0.01)))


# F, G, H. Gradients edited by hand after backward.


def hand_clip(model: nn.Module) -> None:
    norm = math.hypot(*(float(parameter.grad.norm()) for parameter in model.parameters()))
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, 0.05 / norm))


def adaptive_clip(parameter: nn.Parameter) -> None:
    allowed = 0.01 * parameter.detach().norm().clamp(min=1e-3)
    parameter.grad.mul_((allowed / parameter.grad.norm()).clamp(max=1.0))


def centralise(parameter: nn.Parameter) -> None:
    if parameter.dim() > 1:
        parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))


def noise(parameter: nn.Parameter) -> Tensor:
    generator = torch.Generator().manual_seed(parameter.numel())
    return torch.randn(parameter.shape, generator=generator) * 0.1


def noise_on_biases(parameter: nn.Parameter) -> None:
    if parameter.dim() == 1:
        parameter.grad.add_(noise(parameter))


def forget_last_layer(model: nn.Module) -> None:
    for parameter in model[2].parameters():
        parameter.grad = None


def divided_all_at_once(model: nn.Module) -> None:
    torch._foreach_div_([parameter.grad for parameter in model.parameters()], 12.0)


def sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def static_scale(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model, batch) * 128


absent = {"has_clip": False}
"""Gradients looked at at several times have no one coefficient."""
divided = each(lambda parameter: parameter.grad.div_(36))
variant("divided_by_tokens", EDITED, loss=sum_loss, micro=3, edit=divided)
variant(
    "divided_by_tokens_then_clipped", EDITED, loss=sum_loss, micro=3, edit=divided, clip=by_norm
)
variant("divided_all_at_once", EDITED, edit=divided_all_at_once)
variant("divided_into_new_tensors", EDITED, edit=replaced(lambda p: p.grad / 12))
variant("divided_through_data", EDITED, edit=each(lambda p: p.grad.data.div_(12)))
variant("multiplied", EDITED, edit=each(lambda p: p.grad.mul_(4)))
variant("static_loss_scale", EDITED, loss=static_scale, edit=each(lambda p: p.grad.div_(128)))
variant("clipped_by_hand", EDITED, edit=hand_clip)
variant("adaptive_clipping", EDITED, edit=each(adaptive_clip))
variant("centralised", EDITED, entry=absent, edit=each(centralise))
variant("noise_on_all", EDITED, edit=each(lambda p: p.grad.add_(noise(p))))
variant("noise_on_biases", EDITED, entry=absent, edit=each(noise_on_biases))
variant("clipped_then_noise", EDITED, clip=by_norm, edit=each(lambda p: p.grad.add_(noise(p))))
variant("sign_of_gradient", EDITED, edit=each(lambda p: p.grad.sign_()))
variant("sign_in_new_tensors", EDITED, edit=replaced(lambda p: p.grad.sign()))
variant("sign_flipped_in_one_layer", EDITED, entry=absent, edit=lambda m: m[0].weight.grad.neg_())
variant("sign_flipped_everywhere", EDITED, edit=each(lambda p: p.grad.neg_()))
variant("l2_by_hand", EDITED, edit=each(lambda p: p.grad.add_(p.detach(), alpha=0.1)))
variant("normalised_layer_by_layer", EDITED, edit=each(lambda p: p.grad.div_(p.grad.norm())))
variant("layer_scaled", EDITED, entry=absent, edit=lambda m: m[0].weight.grad.mul_(0.1))
variant("last_layer_scaled", EDITED, entry=absent, edit=lambda m: m[2].bias.grad.mul_(0.1))
variant("masked", EDITED, edit=each(lambda p: p.grad.mul_(noise(p) > 0)))
variant("first_layer_cleared", EDITED, entry=absent, edit=lambda m: m[0].weight.grad.zero_())
variant("last_layer_set_to_none", EDITED, edit=forget_last_layer)
variant("nan_replaced", EDITED, edit=replaced(lambda p: p.grad.nan_to_num().mul(0.5)))
variant("replaced_by_a_constant", EDITED, edit=replaced(lambda p: torch.full_like(p, 0.1)))
variant("replaced_then_clipped", EDITED, edit=replaced(lambda p: p.grad.sign()), clip=by_norm)
variant("grads_reordered", EDITED, edit=each(lambda p: p.grad.copy_(p.grad.flip(0) * 2)))


@loop(label=EDITED)
def edited_between_clip_and_step(truth: Truth, watched: Watched) -> None:
    """The record has the gradient that the optimizer used, as nothing clipped it after the edit."""
    model = mlp()
    optimizer = sgd(model)
    with watched(model, optimizer):
        for step in range(STEPS):
            loss_of(model, data(step)).backward()
            by_norm(model)
            for parameter in model.parameters():
                parameter.grad.add_(noise(parameter))
            finish(truth, model, optimizer)
    truth.done(model)


def finish(truth: Truth, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Record the gradients as they are, step and clear."""
    truth.gradient(model)
    truth.used(model)
    truth.step(float(optimizer.param_groups[0]["lr"]))
    optimizer.step()
    optimizer.zero_grad()


def several_passes(
    truth: Truth,
    watched: Watched,
    *,
    combine: Callable[[nn.Module, Callable[[int], list[Tensor]], int], list[Tensor]],
) -> None:
    """Several backward passes, then `p.grad =` what `combine` makes of their gradients."""
    model = mlp()
    optimizer = sgd(model)

    def gradients(number: int) -> list[Tensor]:
        model.zero_grad()
        loss_of(model, data(number)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with watched(model, optimizer):
        for step in range(STEPS):
            new = combine(model, gradients, 10 * step)
            for parameter, gradient in zip(model.parameters(), new, strict=True):
                parameter.grad = gradient
            finish(truth, model, optimizer)
    truth.done(model)


def private(model: nn.Module, gradients: Any, number: int) -> list[Tensor]:
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for part in range(3):
        gradients(number + part)
        by_norm(model, 1.0)
        for held, parameter in zip(total, model.parameters(), strict=True):
            held += parameter.grad / 3
    return total


def mean_of_saved(model: nn.Module, gradients: Any, number: int) -> list[Tensor]:
    saved = [gradients(number + part) for part in range(3)]
    return [torch.stack(parts).mean(0) for parts in zip(*saved, strict=True)]


def projected(model: nn.Module, gradients: Any, number: int) -> list[Tensor]:
    return _project(gradients(number), gradients(number + 1))


def _project(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    pairs = list(zip(first, second, strict=True))
    inner = sum(float((a * b).sum()) for a, b in pairs)
    square = sum(float(b.square().sum()) for b in second)
    return [a - min(inner, 0.0) / square * b + b for a, b in pairs]


def variance_reduced(model: nn.Module, gradients: Any, number: int) -> list[Tensor]:
    old, now = gradients(number + 1), gradients(number)
    return [a - 0.5 * b for a, b in zip(now, old, strict=True)]


def autograd_added(model: nn.Module, gradients: Any, number: int) -> list[Tensor]:
    mine = gradients(number)
    others = torch.autograd.grad(loss_of(model, data(number + 1)), list(model.parameters()))
    return [a + b for a, b in zip(mine, others, strict=True)]


def probed(model: nn.Module, gradients: Any, number: int) -> list[Tensor]:
    saved = gradients(number)
    gradients(number + 1)
    return saved


LOOPS += [
    Loop(combine.__name__, partial(several_passes, combine=combine), EDITED)
    for combine in (private, mean_of_saved, projected, variance_reduced, autograd_added, probed)
]


# I. Clipping in hooks and inside `step`.


class Hooked(nn.Sequential):
    """An MLP whose parameters have hooks."""

    def __init__(self, register: str, hook: Callable[[Any], Any]) -> None:
        super().__init__(*mlp())
        for parameter in self.parameters():
            getattr(parameter, register)(hook)


def clamp_in_place(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


class ClipsInside(SGD):
    """An optimizer that clips in its own step."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_(self.param_groups[0]["params"], 0.05)
        return super().step(closure)


class ScalesInside(SGD):
    """An optimizer that scales its gradients by hand in its own step."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


clamped = partial(Hooked, "register_hook", lambda gradient: gradient.clamp(-0.01, 0.01))
variant("clamped_by_hooks", HOOKED, model=clamped, entry=absent)
variant(
    "halved_by_hooks", HOOKED, model=partial(Hooked, "register_hook", lambda g: g / 2), entry=absent
)
variant(
    "clamped_after_accumulation",
    HOOKED,
    model=partial(Hooked, "register_post_accumulate_grad_hook", clamp_in_place),
    entry=absent,
)
variant("clipped_inside_step", make=lambda m: ClipsInside(m.parameters(), lr=0.1), entry=absent)
variant("scaled_inside_step", make=lambda m: ScalesInside(m.parameters(), lr=0.1), entry=absent)


# B. Optimizer subclasses.


class CallsSuper(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class CallsSuperTwice(CallsSuper):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class AdamSubclass(AdamW):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.999)
        return super().step(closure)


def base_class_first(kind: Callable[..., Any], model: nn.Module) -> Any:
    """Torch calls the hooks of a step twice only if the base class was used before."""
    for base in (SGD, AdamW):
        base([nn.Parameter(torch.zeros(1))], lr=1.0)
    return kind(model.parameters(), lr=0.1)


variant("subclass_calls_super", make=partial(base_class_first, CallsSuper))
variant("subclass_of_subclass", make=partial(base_class_first, CallsSuperTwice))
variant("subclass_of_adamw", make=partial(base_class_first, AdamSubclass), clip=by_norm)
variant(
    "subclass_logged",
    make=partial(base_class_first, CallsSuper),
    log=lambda watch, loss, model: watch.log(loss=loss * 1),
)


# C. Parameters that change in the middle.


def at_step_two(change: Callable[[nn.Module, torch.optim.Optimizer], object]) -> Any:
    return lambda model, optimizer, step: change(model, optimizer) if step == 2 else None


def swap_head(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2] = nn.Linear(16, 4)
    optimizer.param_groups[0]["params"][2:] = list(model[2].parameters())


def add_head(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2] = nn.Linear(16, 4)
    optimizer.add_param_group({"params": list(model[2].parameters())})


def replace_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    optimizer.param_groups[0]["params"][0] = model[0].weight


def add_adapter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": list(model[3].parameters())})


def weight_norm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.parametrizations.weight_norm(model[2])
    optimizer.param_groups[0]["params"][:] = list(model.parameters())


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(False)


def tie(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight = model[0].weight


def square_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


class Table(nn.Module):
    """An embedding that can grow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x[:, 0].abs().mul(3).long() % self.table.num_embeddings))


def resize(model: Any, optimizer: torch.optim.Optimizer) -> None:
    larger = nn.Embedding(14, 4)
    with torch.no_grad():
        larger.weight[:10] = model.table.weight
    model.table = larger
    optimizer.param_groups[0]["params"][0] = larger.weight


def head_only(model: nn.Module) -> SGD:
    model[0].requires_grad_(False)
    return sgd(model[2])


variant("head_swapped_in_its_group", begin=at_step_two(swap_head))
variant("head_added_by_a_group", begin=at_step_two(add_head))
variant("head_swapped_and_clipped", begin=at_step_two(swap_head), clip=by_norm)
variant("parameter_replaced", begin=at_step_two(replace_parameter))
variant("adapter_added", begin=at_step_two(add_adapter))
variant("weight_norm_added", begin=at_step_two(weight_norm))
variant("embedding_resized", model=Table, begin=at_step_two(resize))
variant("unfrozen_by_a_group", make=head_only, begin=at_step_two(unfreeze))
variant("frozen_later", begin=at_step_two(freeze))
variant(
    "tied_later",
    model=square_mlp,
    begin=at_step_two(tie),
)
variant(
    "doubled_later",
    loss=lambda m, batch: cross_entropy(m(batch[0].to(m[0].weight.dtype)), batch[1]),
    begin=at_step_two(lambda model, optimizer: model.double()),
)
variant("head_swapped_and_logged", begin=at_step_two(swap_head), log=exponential)


# Learning rates.


def scheduled(make: Callable[[torch.optim.Optimizer], Any], *given: Any) -> dict[str, Any]:
    held: list[Any] = []

    def begin(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            held[:] = [make(optimizer)]

    return {"begin": begin, "end": lambda model, optimizer, step: held[0].step(*given)}


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (step + 1)


def tensor_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.1 / (step + 1))


schedules = torch.optim.lr_scheduler
variant("lr_one_cycle", **scheduled(lambda o: schedules.OneCycleLR(o, 0.2, total_steps=9)))
variant("lr_plateau", **scheduled(lambda o: schedules.ReduceLROnPlateau(o, patience=0), 1.0))
variant("lr_steps", **scheduled(lambda o: schedules.StepLR(o, 1)))
variant("lr_lambda", **scheduled(lambda o: schedules.LambdaLR(o, lambda step: 0.5**step)))
variant("lr_by_hand", begin=by_hand)
variant(
    "lr_tensor_in_place",
    make=lambda m: AdamW(m.parameters(), lr=torch.tensor(0.1)),
    begin=tensor_in_place,
)


# Data types and sizes.


class Odd(nn.Module):
    """Zero-dimensional, empty, complex and unused parameters, and two data types."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.ones(3))
        self.wave = nn.Parameter(torch.tensor([1 + 2j, 0.5 - 1j]))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x) * self.scale + self.empty.sum() + self.wave.prod().abs()
        return out * self.wide


def cast(dtype: torch.dtype) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0].to(dtype)).double(), batch[1])

    return {"model": lambda: mlp().to(dtype), "loss": loss}


def sized(size: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch[0].to(dtype)), batch[1]) * size

    return {"model": lambda: mlp().to(dtype), "make": partial(sgd, lr=1e-3 / size), "loss": loss}


def nan_in_one(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model, batch) + model[2].bias[0] * math.nan


variant("odd_parameters", model=Odd)
variant("odd_parameters_clipped", model=Odd, clip=by_norm)
variant("float64", **cast(torch.float64))
variant("float16", **cast(torch.float16))
variant("bfloat16", **cast(torch.bfloat16))
variant("size_1e30", **sized(1e30))
variant("size_1e-30", **sized(1e-30))
variant("size_1e200", **sized(1e200, torch.float64))
variant("size_1e-200", **sized(1e-200, torch.float64))
variant("nan_in_one", loss=nan_in_one, entry=absent)


# E. Automatic mixed precision.


def amp(
    truth: Truth,
    watched: Watched,
    *,
    make: Callable[[nn.Module], Any] = sgd,
    clip: bool = False,
    unscale: bool = True,
    micro: Callable[[int], int] = lambda step: 1,
    overflow_at: int | None = None,
    new_scale: float | None = None,
    by_hand: bool = False,
    **options: Any,
) -> None:
    """Train with a GradScaler."""
    model = mlp()
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **options})
    with watched(model, optimizer):
        for step in range(STEPS):
            for part in range(micro(step)):
                value = loss_of(model, data(10 * step + part)) / micro(step)
                scaler.scale(value * (math.inf if step == overflow_at else 1.0)).backward()
            scale = scaler.get_scale()
            if by_hand:
                for parameter in model.parameters():
                    parameter.grad.div_(scale)
                scale = 1.0
            truth.gradient(model, scale)
            if unscale and not by_hand:
                scaler.unscale_(optimizer)
                scale = 1.0
            if clip:
                by_norm(model)
            truth.used(model, scale)
            truth.step(float(optimizer.param_groups[0]["lr"]))
            if by_hand:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update(new_scale)
            optimizer.zero_grad()
    truth.done(model)


def amp_variant(name: str, label: str = TRUE, *, entry: Any = None, **parts: Any) -> None:
    LOOPS.append(Loop(name, partial(amp, **parts), label, **(entry or {})))


fused = {"make": lambda model: SGD(model.parameters(), lr=0.1, fused=True)}
amp_variant("scaler", unscale=False)
amp_variant("scaler_default_scale", unscale=False, init_scale=65536.0)
amp_variant("scaler_unscaled_and_clipped", clip=True)
amp_variant("scaler_growing", clip=True, growth_interval=1)
amp_variant("scaler_accumulating_unevenly", micro=lambda step: 1 + step % 3, clip=True)
amp_variant("scaler_overflow", overflow_at=1, clip=True)
amp_variant("scaler_new_scale", new_scale=256.0, clip=True)
amp_variant("scaler_disabled", enabled=False, clip=True)
amp_variant("scaler_fused", unscale=False, **fused)
amp_variant("scaler_fused_clipped", clip=True, **fused)
amp_variant("scaler_divided_by_hand", EDITED, by_hand=True)
amp_variant("scaler_clipped_without_unscaling", unscale=False, clip=True)


def amp_of_two(truth: Truth, watched: Watched, *, unscale: bool, together: bool) -> None:
    """Two losses and two optimizers under one scaler."""
    model = mlp()
    first, second = halves(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watched(model, [first, second]):
        for step in range(STEPS):
            x, y = data(step)
            hidden = model[1](model[0](x))
            losses = [cross_entropy(hidden[:, :4], y), cross_entropy(model[2](hidden.detach()), y)]
            if together:
                losses = scaler.scale(losses)
            for loss, optimizer, start in zip(losses, (first, second), ("0", "2"), strict=True):
                (loss if together else scaler.scale(loss)).backward()
                truth.gradient(model, 1024, start)
                if unscale and optimizer is first:
                    scaler.unscale_(first)
                    truth.used(model, 1, start)
                else:
                    truth.used(model, 1024, start)
                scaler.step(optimizer)
            truth.step(0.1)
            scaler.update()
            model.zero_grad()
    truth.done(model)


for _unscale, _together in ((False, True), (True, True), (False, False), (True, False)):
    LOOPS.append(
        Loop(
            f"scaler_of_two{'_unscaled_on_one' * _unscale}{'_scaled_at_once' * _together}",
            partial(amp_of_two, unscale=_unscale, together=_together),
        )
    )


# Several optimizers.


def of_halves(
    truth: Truth,
    watched: Watched,
    *,
    steps_of: Callable[[int], tuple[int, ...]] = lambda step: (0, 1),
    clip: Callable[[nn.Module], object] = nothing,
) -> None:
    """One backward pass, then those optimizers step whose turn it is."""
    model = mlp()
    optimizers = halves(model)
    with watched(model, optimizers):
        for step in range(STEPS):
            loss_of(model, data(step)).backward()
            turn = steps_of(step)
            for number in turn:
                truth.gradient(model, start=str(2 * number))
            clip(model)
            for number in turn:
                truth.used(model, start=str(2 * number))
                optimizers[number].step()
            truth.step(optimizers[turn[0]].param_groups[0]["lr"])
            model.zero_grad()
    truth.done(model)


def halves_variant(name: str, **parts: Any) -> None:
    LOOPS.append(Loop(name, partial(of_halves, **parts)))


halves_variant("optimizer_for_each_layer")
halves_variant("optimizer_for_each_layer_clipped", clip=by_norm)
halves_variant("second_optimizer_idle", steps_of=lambda step: (0,))
halves_variant("first_optimizer_idle", steps_of=lambda step: (1,))
halves_variant("optimizers_in_other_order", steps_of=lambda step: (1, 0))


class Pair(nn.Module):
    """Two networks; the second's loss also leaves gradients in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = mlp()
        self.maker = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.maker(x))


def in_turn(truth: Truth, watched: Watched, *, critic_steps: int = 1) -> None:
    """A GAN: a step of the record ends when both have stepped; the critic's last step counts."""
    model = Pair()
    critic, maker = sgd(model.critic), sgd(model.maker, 0.05)
    with watched(model, [critic, maker]):
        for step in range(STEPS):
            for turn in range(critic_steps):
                critic.zero_grad()
                loss_of(model.critic, data(10 * step + turn)).backward()
                truth.gradient(model, start="critic")
                truth.used(model, start="critic")
                critic.step()
            maker.zero_grad()
            loss_of(model, data(10 * step)).backward()
            truth.gradient(model, start="maker")
            truth.used(model, start="maker")
            maker.step()
            truth.step(0.1)
    truth.done(model)


LOOPS.append(Loop("adversaries", in_turn))


@loop(missing=2, problems=("other-optimizer",))
def optimizer_made_again(truth: Truth, watched: Watched) -> None:
    model = mlp()
    optimizer = sgd(model)
    with watched(model, optimizer):
        for step in range(STEPS):
            if step == 2:
                optimizer = sgd(model, 0.05)
            loss_of(model, data(step)).backward()
            finish(truth, model, optimizer)
    truth.done(model)


@loop()
def ascent_with_another_optimizer(truth: Truth, watched: Watched) -> None:
    """SAM: the first optimizer climbs, the second descends; both hold all parameters."""
    model = mlp()
    climb = SGD(model.parameters(), lr=0.05, maximize=True)
    descend = sgd(model)
    with watched(model, [climb, descend]):
        for step in range(STEPS):
            before = copy.deepcopy(model.state_dict())
            loss_of(model, data(step)).backward()
            climb.step()
            model.zero_grad()
            loss_of(model, data(step)).backward()
            model.load_state_dict(before)
            finish(truth, model, descend)
    truth.done(model)


# Several passes in a step.


def passes_of(
    truth: Truth, watched: Watched, *, passes: Callable[[nn.Module, int], object]
) -> None:
    """`passes` makes all the backward passes of a step."""
    model = mlp()
    optimizer = sgd(model)
    with watched(model, optimizer):
        for step in range(STEPS):
            passes(model, step)
            finish(truth, model, optimizer)
    truth.done(model)


def sharpness_aware(model: nn.Module, step: int) -> None:
    loss_of(model, data(step)).backward()
    moves = [0.05 * parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), moves)
    model.zero_grad()
    loss_of(model, data(step)).backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)


def extragradient(model: nn.Module, step: int) -> None:
    before = copy.deepcopy(model.state_dict())
    for parameter, gradient in zip(
        model.parameters(),
        torch.autograd.grad(loss_of(model, data(step)), list(model.parameters())),
        strict=True,
    ):
        parameter.data -= 0.1 * gradient
    loss_of(model, data(step)).backward()
    model.load_state_dict(before)


def meta_learned(model: nn.Module, step: int) -> None:
    named = dict(model.named_parameters())
    inner = torch.autograd.grad(loss_of(model, data(step)), list(named.values()), create_graph=True)
    adapted = {n: p - 0.1 * g for (n, p), g in zip(named.items(), inner, strict=True)}
    x, y = data(step + 50)
    cross_entropy(torch.func.functional_call(model, adapted, (x,)), y).backward()


def gradient_penalty(model: nn.Module, step: int) -> None:
    x, y = data(step)
    x = x.requires_grad_()
    loss = cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()


def only_first_layer(model: nn.Module, step: int) -> None:
    loss_of(model, data(step)).backward(inputs=list(model[0].parameters()))


def two_losses(model: nn.Module, step: int) -> None:
    out = model(data(step)[0])
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def same_graph_twice(model: nn.Module, step: int) -> None:
    loss = loss_of(model, data(step))
    loss.backward(retain_graph=True)
    loss.backward()


def out_of_memory_once(model: nn.Module, step: int) -> None:
    try:
        out = model(data(step)[0])
        out.register_hook(_out_of_memory)
        out.square().mean().backward()
    except RuntimeError:
        model.zero_grad()
    loss_of(model, data(step)).backward()


def _out_of_memory(gradient: Tensor) -> None:
    raise RuntimeError("out of memory")


def in_a_thread(model: nn.Module, step: int) -> None:
    thread = threading.Thread(target=lambda: loss_of(model, data(step)).backward())
    thread.start()
    thread.join()


def added_to_clipped(model: nn.Module, step: int) -> None:
    loss_of(model, data(step)).backward()
    by_norm(model)
    loss_of(model, data(step + 50)).backward()


def added_to_divided(model: nn.Module, step: int) -> None:
    loss_of(model, data(step)).backward()
    divided(model)
    loss_of(model, data(step + 50)).backward()


def cleared(model: nn.Module, step: int) -> None:
    loss_of(model, data(step)).backward()
    model.zero_grad()


def cleared_in_place(model: nn.Module, step: int) -> None:
    loss_of(model, data(step)).backward()
    model.zero_grad(set_to_none=False)


def backward_only_once(model: nn.Module, step: int) -> None:
    if step == 0:
        loss_of(model, data(step)).backward()


def autograd_only(model: nn.Module, step: int) -> None:
    gradients = torch.autograd.grad(loss_of(model, data(step)), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def projected_by_autograd(model: nn.Module, step: int) -> None:
    parameters = list(model.parameters())
    first, second = (
        list(torch.autograd.grad(loss_of(model, data(step + number)), parameters))
        for number in (0, 50)
    )
    for parameter, gradient in zip(parameters, _project(first, second), strict=True):
        parameter.grad = gradient


def functional(model: nn.Module, step: int) -> None:
    x, y = data(step)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, gradient in torch.func.grad(loss)(held).items():
        model.get_parameter(name).grad = gradient


def autograd_for_one_layer(model: nn.Module, step: int) -> None:
    """DARTS: one part gets its gradient by autograd.grad, the other by backward."""
    loss_of(model, data(step)).backward(inputs=list(model[0].parameters()))
    parameters = list(model[2].parameters())
    gradients = torch.autograd.grad(loss_of(model, data(step + 50)), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


for _passes, _label in (
    (sharpness_aware, TRUE),
    (extragradient, TRUE),
    (meta_learned, TRUE),
    (gradient_penalty, TRUE),
    (only_first_layer, TRUE),
    (two_losses, TRUE),
    (same_graph_twice, TRUE),
    (out_of_memory_once, TRUE),
    (in_a_thread, TRUE),
    (added_to_clipped, BETWEEN),
    (added_to_divided, BETWEEN),
    (cleared_in_place, EDITED),
    (autograd_only, LATE),
    (projected_by_autograd, LATE),
    (functional, LATE),
):
    LOOPS.append(Loop(_passes.__name__, partial(passes_of, passes=_passes), _label))
LOOPS += [
    Loop("cleared", partial(passes_of, passes=cleared), NONE, problems=("no-gradient",)),
    Loop(
        "backward_only_once",
        partial(passes_of, passes=backward_only_once),
        (TRUE, NONE, NONE, NONE),
        problems=("no-gradient",),
    ),
    Loop(
        "autograd_for_one_layer",
        partial(passes_of, passes=autograd_for_one_layer),
        LATE,
        has_clip=False,
    ),
]


class Architecture(nn.Module):
    """DARTS' shape: weights, and two numbers that mix the branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
        self.mix = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mix.softmax(0)
        return weight[0] * self.left(x) + weight[1] * self.right(x)


@loop(label=(LATE, EDITED, EDITED, EDITED))
def architecture_search(truth: Truth, watched: Watched) -> None:
    """Another loss also runs into the gradient that is set by hand."""
    model = Architecture()
    weights = SGD([*model.left.parameters(), *model.right.parameters()], lr=0.1)
    mix = Adam([model.mix], lr=0.01)
    with watched(model, [mix, weights]):
        for step in range(STEPS):
            mix.zero_grad()
            (model.mix.grad,) = torch.autograd.grad(loss_of(model, data(step)), model.mix)
            truth.gradient(model, start="mix")
            truth.used(model, start="mix")
            mix.step()
            weights.zero_grad()
            loss_of(model, data(step + 50)).backward()
            for start in ("left", "right"):
                truth.gradient(model, start=start)
                truth.used(model, start=start)
            weights.step()
            truth.step(0.01)
    truth.done(model)


@loop(label=LATE, only_watch=True)
def reptile(truth: Truth, watched: Watched) -> None:
    """The gradient is the way to a copy that was trained; see test_copies_get_own_records."""
    model = mlp()
    optimizer = sgd(model)
    with watched(model, optimizer):
        for step in range(STEPS):
            inner = copy.deepcopy(model)
            descend = sgd(inner)
            for part in range(2):
                inner.zero_grad()
                loss_of(inner, data(10 * step + part)).backward()
                descend.step()
            for parameter, goal in zip(model.parameters(), inner.parameters(), strict=True):
                parameter.grad = (parameter - goal).detach()
            finish(truth, model, optimizer)
    truth.done(model)


# Closures, and steps that are made or left out in other ways.


def with_closure(
    truth: Truth,
    watched: Watched,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    clip: Callable[[nn.Module], object] = nothing,
    micro: int = 1,
) -> None:
    """The first evaluation of the closure is where the step starts from."""
    model = mlp()
    optimizer = make(model)
    with watched(model, optimizer):
        for step in range(STEPS):
            evaluations = 0

            def closure(step: int = step) -> Tensor:
                nonlocal evaluations
                optimizer.zero_grad()
                for part in range(micro):
                    loss = loss_of(model, data(10 * step + part)) / micro
                    loss.backward()
                if evaluations == 0:
                    truth.gradient(model)
                clip(model)
                if evaluations == 0:
                    truth.used(model)
                evaluations += 1
                return loss

            optimizer.step(closure)
            truth.step(optimizer.param_groups[0]["lr"])
    truth.done(model)


def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


for _name, _parts in {
    "lbfgs": {"make": lbfgs},
    "lbfgs_clipped_in_closure": {"make": lbfgs, "clip": by_norm},
    "closure": {"make": sgd},
    "closure_accumulating": {"make": sgd, "micro": 3},
    "closure_of_a_subclass": {"make": partial(base_class_first, CallsSuper)},
}.items():
    # Gradsight is attached inside the first closure, which may still clip.
    LOOPS.append(Loop(_name, partial(with_closure, **_parts), run_clip_missing=1))


@loop()
def skipped_by_hand(truth: Truth, watched: Watched) -> None:
    """Batches that the loop does not like make no step."""
    model = mlp()
    optimizer = sgd(model)
    with watched(model, optimizer):
        for step in range(2 * STEPS):
            loss_of(model, data(step)).backward()
            if step % 2:
                optimizer.zero_grad()
            else:
                finish(truth, model, optimizer)
    truth.done(model)


@loop(label=(TRUE, TRUE, TRUE, TRUE, NONE), problems=("no-gradient",))
def step_without_backward(truth: Truth, watched: Watched) -> None:
    model = mlp()
    optimizer = sgd(model)
    with watched(model, optimizer):
        for step in range(STEPS):
            loss_of(model, data(step)).backward()
            finish(truth, model, optimizer)
        finish(truth, model, optimizer)
    truth.done(model)


@loop()
def watch_in_mid_accumulation(truth: Truth, watched: Watched) -> None:
    """The first step's gradients were begun before the watch; the optimizer uses them too."""
    model = mlp()
    optimizer = sgd(model)
    loss_of(model, data(77)).backward()
    with watched(model, optimizer):
        for step in range(STEPS):
            loss_of(model, data(step)).backward()
            finish(truth, model, optimizer)
    truth.done(model)


@loop()
def flat_gradient_buffer(truth: Truth, watched: Watched) -> None:
    """All gradients are views of one tensor, which is cleared at once."""
    model = mlp()
    optimizer = sgd(model)
    buffer = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    start = 0
    for parameter in model.parameters():
        parameter.grad = buffer[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    with watched(model, optimizer):
        for step in range(STEPS):
            buffer.zero_()
            loss_of(model, data(step)).backward()
            truth.gradient(model)
            truth.used(model)
            truth.step(0.1)
            optimizer.step()
    truth.done(model)


@loop()
def lookahead(truth: Truth, watched: Watched) -> None:
    """Every second step the weights go half the way back."""
    model = mlp()
    optimizer = sgd(model)
    slow = copy.deepcopy(model.state_dict())
    with watched(model, optimizer):
        for step in range(STEPS):
            loss_of(model, data(step)).backward()
            finish(truth, model, optimizer)
            if step % 2:
                state = {n: (w + slow[n]) / 2 for n, w in model.state_dict().items()}
                model.load_state_dict(state)
                slow = copy.deepcopy(state)
    truth.done(model)


@loop()
def averaged_copy(truth: Truth, watched: Watched) -> None:
    """A deep copy follows the weights, and is evaluated with a graph."""
    model = mlp()
    optimizer = sgd(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    with watched(model, optimizer):
        for step in range(STEPS):
            loss_of(model, data(step)).backward()
            finish(truth, model, optimizer)
            average.update_parameters(model)
            loss_of(average, data(99))
    truth.done(model)


@loop()
def compiled(truth: Truth, watched: Watched) -> None:
    train(truth, watched, model=lambda: torch.compile(mlp(), backend="eager"), clip=by_norm)


# Steps that the loop itself announces.


def manual(truth: Truth, watched: Watched, *, clip_first: bool) -> None:
    model = mlp()
    optimizer = sgd(model)
    with watched(model, None) as watch:
        for step in range(STEPS):
            loss_of(model, data(step)).backward()
            if clip_first:
                by_norm(model)
            truth.gradient(model)
            watch.step()
            truth.step()
            by_norm(model)
            optimizer.step()
            optimizer.zero_grad()
    truth.done(model)


LOOPS.append(Loop("manual_steps", partial(manual, clip_first=False), only_watch=True))
LOOPS.append(
    Loop("manual_steps_after_clipping", partial(manual, clip_first=True), EDITED, only_watch=True)
)
BY_NAME = {entry.name: entry for entry in LOOPS}
assert len(BY_NAME) == len(LOOPS), "two loops have the same name"


# Running them without a watch, and attached as `gradsight run` does it.


class Unwatched:
    """What a loop gets where no watch is open."""

    def log(self, **values: object) -> None:
        """Forget them."""

    def step(self) -> None:
        """Do nothing."""


@contextmanager
def unwatched(model: nn.Module, optimizers: object) -> Iterator[Unwatched]:
    yield Unwatched()


def main(folder: Path, name: str) -> None:
    """Train in this process, unmodified, with Gradsight attached; the truth goes into a file."""
    import gradsight
    from gradsight.attach import __file__ as attach

    torch.set_num_threads(1)
    os.environ["GRADSIGHT_HOME"] = str(Path(gradsight.__file__).parents[1])
    os.environ["GRADSIGHT_CHECK"] = json.dumps({"run_dir": str(folder / "run"), "keep": True})
    site = runpy.run_path(str(Path(attach).parent / "site" / "sitecustomize.py"))
    site["_notice_optimizers"](sys.modules["torch.optim.optimizer"])
    truth = Truth()
    BY_NAME[name].train(truth, unwatched)
    steps = [asdict(step) for step in truth.steps]
    (folder / "truth.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
