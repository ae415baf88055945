"""Hooks of ours: torch calls them through a guard, which takes them away at its end."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gradsight.core.guard import Guard

_Register = Callable[..., Any]
"""A method of torch's that takes a hook and returns a handle."""
_Hook = Callable[..., Any]
_KNOWN = ("torch.", "gradsight.")
"""Modules whose hooks on parameters do not change what a gradient is."""


def put_hook(guard: Guard, register: _Register, hook: _Hook) -> Any:
    """Register a hook of ours, on an optimizer, a tensor or all optimizers; the handle of it."""
    handle = register(partial(guard.run, hook))
    guard.at_end(handle.remove)
    return handle


def has_other_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks that are neither torch's nor Gradsight's edit this tensor's gradient."""
    hooks = getattr(tensor, "_backward_hooks", None), tensor._post_accumulate_grad_hooks
    return any(
        not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_KNOWN)
        for each in hooks
        if each
        for hook in each.values()
    )


def put_module_hook(guard: Guard, register: _Register, hook: _Hook, **options: Any) -> Any:
    """Register a hook of ours on a module; it is told what torch hands on after the module."""
    handle = register(ModuleHook(guard, hook), **options)
    guard.at_end(handle.remove)
    return handle


class ModuleHook:
    """A hook of ours on a module. A copy of the module has one that does nothing.

    So has one that was saved and loaded.
    """

    # Copies keep the hooks of the original: without this, training a deep copy (a moving average,
    # a teacher) would be taken for the watched model's, and pickling would take our state along.

    def __init__(self, guard: Guard | None = None, hook: _Hook | None = None) -> None:
        self._guard = guard
        self._hook = hook

    def __call__(self, module: nn.Module, *given: Any) -> None:
        # What is being compiled is no call of the model; the guard would break its graph. What runs
        # inside a transform of torch.func has wrapped tensors, whose entries cannot be read.
        if self._hook is None or self._guard is None or torch.compiler.is_compiling():
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        self._guard.run(self._hook, *given)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleHook":
        return type(self)()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
