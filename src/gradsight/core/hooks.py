"""Hooks of ours: torch calls them through a guard, which takes them away at its end."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from gradsight.core.guard import Guard

_Register = Callable[..., Any]
"""A method of torch's that takes a hook and returns a handle."""
_Hook = Callable[..., Any]
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOW_HOOKS_ARE_CALLED = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Where torch keeps the hooks of a module by number, and how some of them are to be called."""
_KNOWN = ("torch.", "gradsight.")
"""Modules whose hooks on parameters do not change what a gradient is."""
_LIBRARIES = frozenset(
    {
        "torch", "transformers", "peft", "accelerate", "lightning", "lightning_fabric",
        "pytorch_lightning", "gradsight",
    }
)  # fmt: skip
"""Packages whose hooks on modules may run in an extra pass: they have no memory."""
_ALL_HOOKS = (*_HOOKS, "_backward_pre_hooks", "_backward_hooks")


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


def hook_that_notices(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Name a hook that could notice an extra call of these modules; None where there is none.

    modules: each with its name.

    Hooks of the script and of libraries such as Opacus may remember calls, and fail after one that
    they did not expect.
    """
    for name, module in modules:
        for hook in _hooks_of(module):
            if not _is_of_a_library(hook):
                return f"{_named(hook)} (on {f'module {name}' if name else 'the model'})"
    for kind in _ALL_HOOKS:
        for hook in getattr(module_hooks, f"_global{kind}").values():
            if not _is_of_a_library(hook):
                return f"{_named(hook)} (on all modules)"
    return None


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    for name in _ALL_HOOKS:
        # Modules of old files may lack some of them.
        yield from (vars(module).get(name) or {}).values()


def _is_of_a_library(hook: Any) -> bool:
    """Whether all code of a hook belongs to libraries whose hooks are known."""
    return all(_is_known(each) for each in _layers(hook))


def _is_known(function: Any) -> bool:
    return _home(function).partition(".")[0] in _LIBRARIES


def _layers(hook: Any) -> Iterator[Any]:
    """The functions that a hook consists of, from the outside to the inside."""
    waiting = [hook]
    seen: set[int] = set()
    while waiting:
        layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(layer, partial):
            waiting.append(layer.func)
            continue
        yield layer
        inner = getattr(layer, "__wrapped__", None)
        if inner is not None:
            waiting.append(inner)


def _home(function: Any) -> str:
    """The name of the module that contains the code of a function, method or callable object."""
    function = getattr(function, "__func__", function)
    # Not `__module__` first: functools.wraps gives a wrapper that of the function inside.
    names = getattr(function, "__globals__", None)
    if names is not None:
        return str(names.get("__name__"))
    owner = function if hasattr(function, "__qualname__") else type(function)
    return str(getattr(owner, "__module__", None) or type(owner).__module__)


def _named(hook: Any) -> str:
    layer = next(each for each in _layers(hook) if not _is_known(each))
    name = getattr(layer, "__qualname__", None) or type(layer).__qualname__
    return f"{name} of {_home(layer)}"


def put_module_hook(guard: Guard, register: _Register, hook: _Hook, **options: Any) -> Any:
    """Register a hook of ours on a module; it is told what torch hands on after the module."""
    module: nn.Module = register.__self__  # type: ignore[attr-defined]
    handle = register(ModuleHook(guard, hook), **options)
    _leave_out_of_copies(module)
    guard.at_end(partial(_remove, handle, weakref.ref(module)))
    return handle


def _remove(handle: Any, module: "weakref.ref[nn.Module]") -> None:
    handle.remove()
    there = module()
    if there is not None and not any(_ours(getattr(there, name)) for name in _HOOKS):
        there.__dict__.pop("__getstate__", None)


def _leave_out_of_copies(module: nn.Module) -> None:
    """Let copies of this module, and files that it is saved to, contain no hooks of ours.

    With them, a file of the whole model (`torch.save(model)`) could only be loaded where Gradsight
    is installed, and not at all with `weights_only=True`.
    """
    # Modules of torch.fx copy their attributes themselves.
    parents = [vars(each) for each in type(module).__mro__[:-1]]
    if not any("__reduce__" in each or "__deepcopy__" in each for each in parents):
        # pickle and copy ask the object for its state, not its class.
        module.__dict__.setdefault("__getstate__", _StateWithoutHooks(module))


class _StateWithoutHooks:
    """The state of a module without hooks of ours."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        module: Any = self._module()
        kind: Any = type(module)
        state = kind.__getstate__(module)
        if not isinstance(state, dict):
            return state
        state = {key: value for key, value in state.items() if value is not self}
        ours = {key for name in _HOOKS for key in _ours(state.get(name) or {})}
        for name in (*_HOOKS, *_HOW_HOOKS_ARE_CALLED):
            if ours & state.get(name, {}).keys():
                kept = [(key, value) for key, value in state[name].items() if key not in ours]
                state[name] = type(state[name])(kept)
        return state


def _ours(hooks: Mapping[int, Any]) -> list[int]:
    return [key for key, hook in hooks.items() if type(hook) is ModuleHook]


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
