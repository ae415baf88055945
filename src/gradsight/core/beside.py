# mypy: allow-untyped-calls
"""A pass run again beside the training: in the state in which it ran, and everything left as it was
found.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from gradsight.core.autocast import autocast_as
from gradsight.core.calls import RecordedCall
from gradsight.core.parameters import clean_name
from gradsight.core.random_state import randomness_kept, set_torch_states
from gradsight.incidents.diagnosis.modes import Eyes


@contextmanager
def replaying(root: nn.Module, one: RecordedCall, eyes: Eyes) -> Iterator[None]:
    """The state in which the model was called; afterwards everything is as it was found. `eyes` are
    to see the operations.
    """
    with ExitStack() as stack:
        stack.enter_context(_modules_kept(root))
        stack.enter_context(_parameters_kept(root))
        stack.callback(eyes.put_back)
        stack.enter_context(randomness_kept(root))
        stack.enter_context(_hooks_silent(list(root.parameters())))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_plain_checkpoints())
        stack.enter_context(autocast_as(one.autocast, {p.device.type for p in root.parameters()}))
        if (
            "torch._dynamo" in sys.modules
        ):  # compiled code runs uncompiled, so that its operations can be seen
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _put_buffers(root, one.buffers)
        if root.training != one.training:
            root.train(one.training)
        set_torch_states(one.rng)
        yield


def arguments(one: RecordedCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the arguments, cut off from whatever made them: a model may change them in place."""
    args, kwargs = tree_map_only(
        Tensor,
        lambda t: t.detach().clone().requires_grad_(t.requires_grad),
        (tuple(one.args), dict(one.kwargs)),
    )
    return args, kwargs


@contextmanager
def _modules_kept(root: nn.Module) -> Iterator[None]:
    """Attributes, training flags and buffers of all modules; the pass sees copies of the buffers."""
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
            if (value := wanted.get(clean_name(root, name))) is not None:
                buffer.copy_(value)


@contextmanager
def _hooks_silent(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Hooks that somebody put on parameters do not run: they may act on the training."""
    held = [(parameter, hooks) for parameter in parameters if (hooks := parameter._backward_hooks)]
    try:
        for parameter, _ in held:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in held:
            parameter._backward_hooks = hooks


@contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Reentrant checkpointing keeps its activations in here: no gradient can be pulled through it
    without touching `.grad`.
    """
    held = vars(CheckpointFunction).get("apply")
    try:
        setattr(CheckpointFunction, "apply", staticmethod(_run))  # noqa: B010
        yield
    finally:
        delattr(CheckpointFunction, "apply")
        if held is not None:
            setattr(CheckpointFunction, "apply", held)  # noqa: B010


def _run(function: Any, _: bool, *args: Any) -> Any:
    return function(*args)
