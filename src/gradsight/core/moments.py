"""The few moments of torch at which a gradient becomes true, in one registry.

A listener is any object with methods named after moments; it is told of those and no others:

    before_backward(tensors)            an outermost backward pass begins, from these tensors
    after_backward()                    it has returned
    gradients_ready()                   everybody has noted that: the gradients can be looked at
    loss_scaled(scaler)                 a loss was multiplied: the next gradients carry the factor
    gradients_unscaled(scaler, optimizer)   the optimizer's gradients were divided by the factor
    scaler_steps(optimizer)             GradScaler.step was called for the optimizer
    scaler_stepped(optimizer)           it has returned; the optimizer may not have been called

Looking when `torch.autograd.backward` has returned sees the gradient before any clipping, however
that is called, and after any reduction. GradScaler is watched because it multiplies gradients, and
because a step that it leaves out calls no optimizer. Errors are the listener's to handle: nothing
of ours may reach the training loop. Everything is put back when the last listener leaves.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from gradsight.core.calls import is_suspended

MOMENTS = (
    "before_backward",
    "after_backward",
    "gradients_ready",
    "loss_scaled",
    "gradients_unscaled",
    "scaler_steps",
    "scaler_stepped",
)

_Original = Callable[..., Any]
"""A function of torch's that one of ours stands in for."""

_told: dict[str, list[Callable[..., None]]] = {moment: [] for moment in MOMENTS}
_listeners: list[object] = []
_originals: list[tuple[Any, str, Any, Any]] = []
_depth = 0
_lock = threading.RLock()  # a signal may close a watch while this is held


def listen(listener: object) -> None:
    """Tell this listener from now on of every moment that it has a method for."""
    methods = {moment: getattr(listener, moment, None) for moment in MOMENTS}
    if not any(methods.values()):
        raise TypeError(f"{type(listener).__name__} has none of the methods {', '.join(MOMENTS)}")
    with _lock:
        if not _listeners:
            _install()
        _listeners.append(listener)
        for moment, method in methods.items():
            if method is not None:
                _told[moment].append(method)


def leave(listener: object) -> None:
    """Stop telling this listener; the last one to leave puts everything back."""
    with _lock:
        if not any(known is listener for known in _listeners):
            return
        _listeners[:] = [known for known in _listeners if known is not listener]
        for methods in _told.values():
            methods[:] = [
                each for each in methods if getattr(each, "__self__", None) is not listener
            ]
        if not _listeners:
            _restore()


def renew_lock() -> None:
    """In a forked child: the thread that held the lock may not exist here."""
    global _lock
    _lock = threading.RLock()


def inside_backward() -> bool:
    """Whether a backward pass is running now, in any thread.

    On accelerators, hooks run in threads of the engine's.
    """
    return _depth > 0


def _tell(moment: str, *args: Any) -> None:
    # A listener may leave while it is told, so a copy is walked through.
    for method in tuple(_told[moment]):
        method(*args)


def _install() -> None:
    scaler = torch.amp.GradScaler
    _replace(torch.autograd, "backward", _backward)
    _replace(scaler, "scale", _scale)
    _replace(scaler, "unscale_", _unscale)
    _replace(scaler, "step", _step)


def _replace(owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    """Put `wrap(original, ...)` in the place of an attribute."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not _listeners or is_suspended():
            return original(*args, **kwargs)
        return wrap(original, *args, **kwargs)

    _originals.append((owner, name, original, replacement))
    setattr(owner, name, replacement)


def _restore() -> None:
    """Put the originals back.

    Where somebody has wrapped ours meanwhile, ours stays inside and passes everything through.
    """
    for owner, name, original, replacement in _originals:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)
    _originals.clear()


def _backward(original: _Original, *args: Any, **kwargs: Any) -> Any:
    global _depth
    if _depth == 0:
        tensors = args[0] if args else kwargs.get("tensors")
        # Not a copy: a watch that is opened by one of these is to hear of this pass too.
        for method in _told["before_backward"]:
            method(tensors)
    with _lock:
        _depth += 1
    try:
        result = original(*args, **kwargs)
    finally:
        with _lock:
            _depth -= 1
    if _depth == 0:
        _tell("after_backward")
        _tell("gradients_ready")
    return result


def _scale(original: _Original, scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
    result = original(scaler, *args, **kwargs)
    if scaler.is_enabled():
        _tell("loss_scaled", scaler)
    return result


def _unscale(original: _Original, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Any:
    result = original(scaler, optimizer)
    if scaler.is_enabled():
        _tell("gradients_unscaled", scaler, optimizer)
    return result


def _step(
    original: _Original,
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not scaler.is_enabled():
        return original(scaler, optimizer, *args, **kwargs)
    _tell("scaler_steps", optimizer)
    result = original(scaler, optimizer, *args, **kwargs)
    _tell("scaler_stepped", optimizer)
    return result
