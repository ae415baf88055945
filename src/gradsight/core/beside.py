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
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from gradsight.core.autocast import autocast_as
from gradsight.core.calls import RecordedCall, is_suspended, suspended
from gradsight.core.function_modes import drop_own_frame
from gradsight.core.guard import lock, register_at_fork
from gradsight.core.held_contents import advanced_by, contents_kept, hidden_modules
from gradsight.core.hooks import hook_that_notices
from gradsight.core.parameters import called_module, clean_name
from gradsight.core.random_state import (
    randomness_kept,
    set_source_state,
    set_torch_states,
    source_state,
    sources_in_code,
)
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

    That is all but parameters and other memory from before which an operation writes to: that
    needs `writes_undone`, or another mode that sees the operations.
    """
    devices = {parameter.device.type for parameter in root.parameters()}
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(_modules_kept(root))
        stack.enter_context(contents_kept(root))
        stack.enter_context(_parameters_kept(root))
        stack.enter_context(_drawn_by_code_kept(root))
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
def writes_undone() -> Iterator[None]:
    """What operations in here write to memory from before is put back; hooks on tensors stay away.

    Models update a codebook, or a moving average of their weights, in their forward pass.
    """
    mode = _Writes()
    try:
        with mode:
            yield
    finally:
        mode.undo()


class _Writes(TorchFunctionMode):
    """Keeps a copy of what an operation is about to write to."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._sources: dict[int, tuple[Any, Any]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation."""
        given = kwargs or {}
        if func is Tensor.register_hook or func is Tensor.register_post_accumulate_grad_hook:
            # The handle of a hook that never runs: the script's own would see gradients twice.
            nobody = torch.zeros((), requires_grad=True)
            return func(nobody, *args[1:])
        for tensor in _written(func, args, given):
            self._keep(tensor)
        source = given.get("generator")
        if source is not None and id(source) not in self._sources:
            self._sources[id(source)] = (source, source_state(source))
        try:
            return func(*args, **given)
        except BaseException as error:
            drop_own_frame(error)
            raise

    def _keep(self, tensor: Tensor) -> None:
        # What has a graph was made by this pass, or belongs to a module that gets it back.
        if tensor.layout is not torch.strided or tensor.grad_fn is not None or tensor.is_meta:
            return
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in self._kept:
            # The alias keeps the memory: nothing else can come to lie there meanwhile.
            self._kept[place] = (tensor.detach(), tensor.detach().clone())

    def undo(self) -> None:
        """Put everything back."""
        for tensor, value in reversed(self._kept.values()):
            # By `data`: graphs of the script must not take it for a change of theirs.
            if not torch.equal(local_part(tensor), local_part(value)):
                tensor.data.copy_(value)
        for source, state in self._sources.values():
            set_source_state(source, state)


_OPERATORS = frozenset(
    {
        "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__",
        "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__",
    }
)  # fmt: skip
"""Operators that write to their first operand."""


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to, by its name."""
    name = getattr(func, "__name__", "")
    written = [kwargs.get("out")]
    if name in _OPERATORS or (name.endswith("_") and not name.endswith("__")):
        written.append(args[0] if args else kwargs.get("tensor"))
    elif name in ("embedding", "embedding_bag") and kwargs.get("max_norm") is not None:
        written.append(args[1] if len(args) > 1 else kwargs.get("weight"))
    flat = [each for one in written for each in (one if isinstance(one, list | tuple) else [one])]
    return [each for each in flat if isinstance(each, Tensor)]


def why_noticed(root: nn.Module) -> str | None:
    """Why something else than Gradsight would notice an extra pass of a model, or None."""
    named = list(root.named_modules())
    named += [(f"a hidden {type(each).__name__}", each) for each in hidden_modules(root)]
    hook = hook_that_notices(named)
    if hook is not None:
        return f"the hook {hook} would see the extra passes and may remember them"
    iterator = advanced_by(root)
    if iterator is not None:
        return f"the extra passes would advance the iterator {iterator}"
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    for mode in modes:
        of_gradsight = type(mode).__module__.partition(".")[0] == "gradsight"
        if not of_gradsight and not isinstance(mode, DeviceContext):
            return f"the mode {type(mode).__qualname__} would see the extra passes"
    return None


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


def called_modules(root: nn.Module) -> list[nn.Module]:
    """Return the root and the submodules that a script may call instead of it.

    The root is never called if it only groups several models, if it is a LightningModule, or if
    the script calls `model.encode(x)`.
    """
    if is_compiled(root):
        return [root]
    found = [root]
    waiting = list(root.children())
    while waiting:
        module = waiting.pop()
        if type(module) in (nn.ModuleList, nn.ModuleDict, nn.Module):
            waiting += list(module.children())
        else:
            found.append(called_module(module))
    return found


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
            if data.layout is not torch.strided or parameter.data_ptr() != data.data_ptr():
                parameter.data = data


@contextmanager
def _drawn_by_code_kept(root: nn.Module) -> Iterator[None]:
    """Generators that forward reaches by a global name or a closure keep their state."""
    functions = {getattr(type(module), "forward", None) for module in root.modules()}
    sources = [each for code in functions for each in sources_in_code(code).values()]
    states = [(source, source_state(source)) for source in sources]
    try:
        yield
    finally:
        for source, state in states:
            set_source_state(source, state)


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
