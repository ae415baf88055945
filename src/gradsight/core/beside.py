# mypy: allow-untyped-calls
"""Passes of ours beside the training: whatever they do, everything is left as it was found."""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from gradsight.core.autocast import autocast_as
from gradsight.core.calls import RecordedCall, is_suspended, suspended
from gradsight.core.guard import lock, register_at_fork
from gradsight.core.held_contents import contents_kept
from gradsight.core.parameters import clean_name
from gradsight.core.random_state import randomness_kept, set_torch_states
from gradsight.core.shards import local_part
from gradsight.errors import GradsightError

# What a replay switches is the process's: torch's checkpoints, its compiler, its generators. Two
# threads that put it back in another order than they took it would leave it switched.
_one_at_a_time = threading.RLock()
register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]


@contextmanager
def beside_training(root: nn.Module, *, evaluating: bool = False) -> Iterator[None]:
    """A pass of ours with gradients; modes and generators are put back, instruments look away.

    `evaluating`: in evaluation mode. This is light enough for every step; a pass in training mode
    changes buffers and attributes too, and wants `replaying`.
    """
    modules = list(root.modules())
    modes = [(module, module.training) for module in modules]
    with suspended(), randomness_kept(modules), torch.enable_grad():
        try:
            if evaluating:
                # The flags, not eval(): a model's own train() may do more than what is put back.
                for module, _ in modes:
                    module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def replaying(root: nn.Module, call: RecordedCall) -> Iterator[None]:
    """The state in which the model was called; afterwards everything is as it was found.

    That is all but memory from before which an operation writes to: only who sees the operations
    can put that back.
    """
    devices = {parameter.device.type for parameter in root.parameters()}
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(_modules_kept(root))
        stack.enter_context(_parameters_kept(root))
        stack.enter_context(beside_training(root))
        stack.enter_context(_hooks_silent(list(root.parameters())))
        # Whoever asks may be in no_grad or in inference mode: backward has to work in here.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_plain_checkpoints())
        stack.enter_context(autocast_as(call.autocast, devices))
        stack.enter_context(eager())
        _put_buffers(root, call.buffers)
        if root.training != call.training:
            root.train(call.training)
        set_torch_states(call.rng)
        yield


@contextmanager
def step_beside_training(root: nn.Module) -> Iterator[None]:
    """A whole step of ours, in training mode and without an optimizer's part.

    Parameters, gradients, buffers, attributes, modes and generators are put back, and hooks that
    somebody put on parameters do not run.
    """
    parameters = list(root.parameters())
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(_modules_kept(root))
        stack.enter_context(contents_kept(root))
        stack.enter_context(_parameters_kept(root))
        stack.enter_context(_values_kept(parameters))
        stack.enter_context(_gradients_kept(parameters))
        stack.enter_context(beside_training(root))
        stack.enter_context(_hooks_silent(parameters))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(eager())
        if not root.training:
            root.train()
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Compiled code runs uncompiled in here, so that its operations can be seen."""
    with ExitStack() as stack:
        # To ask torch.compiler imports the compiler, which takes seconds: where nobody has done
        # so, nothing is compiled.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class CollectiveRefused(GradsightError):
    """A model communicates by itself, so that it cannot be run by one rank alone."""


@contextmanager
def without_collectives() -> Iterator[None]:
    """In here, a collective that a pass of ours comes to raises; those of other threads do not."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    # Every collective of torch's asks this first, and goes on to communicate.
    original = dist.distributed_c10d._rank_not_in_group

    def refused(group: Any) -> bool:
        if is_suspended():
            raise CollectiveRefused("the model communicates with other ranks by itself")
        return bool(original(group))

    with lock:
        dist.distributed_c10d._rank_not_in_group = refused
    try:
        yield
    finally:
        with lock:
            dist.distributed_c10d._rank_not_in_group = original


def is_compiled(root: nn.Module) -> bool:
    """Whether the model or a part of it is compiled."""
    return any(
        hasattr(m, "_orig_mod")
        or getattr(m, "_compiled_call_impl", None) is not None
        # m.forward = torch.compile(m.forward)
        or hasattr(vars(m).get("forward"), "_torchdynamo_orig_callable")
        for m in root.modules()
    )


def process_compiles() -> bool:
    """Whether this process compiles anything with torch."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def copied_arguments(call: RecordedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the arguments, cut off from whatever made them: a model may change its own."""
    args, kwargs = tree_map_only(
        Tensor,
        lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        (tuple(call.args), dict(call.kwargs)),
    )
    return args, kwargs


@contextmanager
def _modules_kept(root: nn.Module) -> Iterator[None]:
    """Keep attributes, flags and buffers of all modules; the pass sees copies of the buffers."""
    held = [
        entries
        for module in root.modules()
        for entries in (vars(module), module._buffers, module._parameters)
    ]
    before = [dict(entries) for entries in held]
    copies: dict[int, Tensor] = {}
    try:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                # By identity: a buffer that two modules share stays one.
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for entries, saved in zip(held, before, strict=True):
            _restore(entries, saved)


@contextmanager
def _parameters_kept(root: nn.Module) -> Iterator[None]:
    """Parameters that a model gives other memory (a momentum encoder's) get theirs back."""
    held = [(parameter, parameter.data) for parameter in root.parameters()]
    try:
        yield
    finally:
        for parameter, data in held:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data


@contextmanager
def _values_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Parameters that the pass itself writes to, such as a codebook's, get their values back."""
    held = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, held, strict=True):
                if not torch.equal(local_part(parameter), local_part(value)):
                    parameter.copy_(value)


@contextmanager
def _gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """The pass finds no gradients; afterwards they are those from before."""
    held = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient


def _restore(entries: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name in entries.keys() - saved.keys():
        del entries[name]
    for name, value in saved.items():
        if entries.get(name) is not value:
            entries[name] = value


def _put_buffers(root: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy the kept buffers into the modules' present ones."""
    wanted = {clean_name(root, name): value for name, value in values.items()}
    with torch.no_grad():
        for name, buffer in root.named_buffers(remove_duplicate=False):
            value = wanted.get(clean_name(root, name))
            if value is not None:
                buffer.copy_(value)


@contextmanager
def _hooks_silent(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Hooks that somebody put on parameters do not run: they may act on the training."""
    held = [(parameter, parameter._backward_hooks) for parameter in parameters]
    silenced = [(parameter, hooks) for parameter, hooks in held if hooks]
    try:
        for parameter, _ in silenced:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in silenced:
            parameter._backward_hooks = hooks


@contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Reentrant checkpointing keeps its activations in here.

    No gradient can be pulled through it by torch.autograd.grad, without touching `.grad`.
    """
    held = vars(CheckpointFunction).get("apply")
    original = CheckpointFunction.apply

    def run(function: Any, keeps_randomness: bool, *args: Any) -> Any:
        if is_suspended():
            return function(*args)
        return original(function, keeps_randomness, *args)  # another thread trains

    try:
        setattr(CheckpointFunction, "apply", staticmethod(run))  # noqa: B010
        yield
    finally:
        delattr(CheckpointFunction, "apply")
        if held is not None:
            setattr(CheckpointFunction, "apply", held)  # noqa: B010
