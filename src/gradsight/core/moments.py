"""The few places of torch where a gradient becomes true, watched for as long as somebody is
interested.

Looking when `torch.autograd.backward` has returned sees the gradient before any clipping, however
that is called, and after any reduction. GradScaler is watched because it multiplies gradients, and
because a step that it leaves out calls no optimizer. Everything is put back when the last observer
leaves.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from gradsight.core.calls import is_suspended


class Observer(Protocol):
    """Who wants to know. Errors are the observer's to handle: `guarded` ones never reach the
    training loop.
    """

    def after_backward(self) -> None:
        """A backward pass has returned (not one inside another)."""

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A loss was multiplied: gradients of the next backward passes carry the scaler's factor."""

    def unscaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """The optimizer's gradients were divided by the scaler's factor."""

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """GradScaler.step was called for the optimizer."""

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        """GradScaler.step has returned; the optimizer may not have been called."""


_observers: list[Observer] = []
_around: list[tuple[Callable[[Any], None], Callable[[], None]]] = []
_originals: list[tuple[Any, str, Any, Any]] = []
_depth = 0
_lock = threading.RLock()  # a signal may close a watch while this is held


def observe(observer: Observer) -> None:
    """Tell this observer from now on."""
    with _lock:
        if not _observers:
            _install()
        _observers.append(observer)


def forget(observer: Observer) -> None:
    """Stop telling this observer; the last one to leave puts everything back."""
    with _lock:
        if observer in _observers:
            _observers.remove(observer)
            if not _observers:
                _restore()


def around_backward(
    before: Callable[[Any], None], after: Callable[[], None], wanted: bool = True
) -> None:
    """Call `before` with the tensors of every outermost backward pass and `after` when it has
    returned, or stop doing so.
    """
    with _lock:
        if wanted:
            _around.append((before, after))
        elif (before, after) in _around:
            _around.remove((before, after))


def renew_lock() -> None:
    """In a forked child: the thread that held the lock may not exist here."""
    global _lock
    _lock = threading.RLock()


def inside_backward() -> bool:
    """Whether a backward pass is running now, in any thread: on accelerators, hooks run in threads
    of the engine's.
    """
    return _depth > 0


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
        return (
            wrap(original, *args, **kwargs)
            if _observers and not is_suspended()
            else original(*args, **kwargs)
        )

    _originals.append((owner, name, original, replacement))
    setattr(owner, name, replacement)


def _restore() -> None:
    """Put the originals back; where somebody has wrapped ours meanwhile, ours stays inside and
    passes everything through.
    """
    for owner, name, original, replacement in _originals:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)
    _originals.clear()


def _backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _depth
    if _depth == 0:
        for (
            before,
            _,
        ) in (
            _around
        ):  # no copy: who is added by one of these, as a new watch is, hears of this pass too
            before(args[0] if args else kwargs.get("tensors"))
    with _lock:
        _depth += 1
    try:
        result = original(*args, **kwargs)
    finally:
        with _lock:
            _depth -= 1
    if _depth == 0:
        for _, after in tuple(_around):
            after()
        for observer in tuple(_observers):
            observer.after_backward()
    return result


def _scale(
    original: Callable[..., Any], scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any
) -> Any:
    result = original(scaler, *args, **kwargs)
    if scaler.is_enabled():
        for observer in tuple(_observers):
            observer.loss_scaled(scaler)
    return result


def _unscale(
    original: Callable[..., Any], scaler: torch.amp.GradScaler, optimizer: Optimizer
) -> Any:
    result = original(scaler, optimizer)
    if scaler.is_enabled():
        for observer in tuple(_observers):
            observer.unscaled(scaler, optimizer)
    return result


def _step(
    original: Callable[..., Any],
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not scaler.is_enabled():
        return original(scaler, optimizer, *args, **kwargs)
    for observer in tuple(_observers):
        observer.scaler_steps(optimizer)
    result = original(scaler, optimizer, *args, **kwargs)
    for observer in tuple(_observers):
        observer.scaler_stepped(optimizer)
    return result
