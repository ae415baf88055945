"""The few moments of torch at which a gradient becomes true, in one registry.

A listener is any object with methods named after moments; it is told of those and no others:

    before_backward(begun)              an outermost backward pass begins
    gradients_before(begun)             there are gradients, which can be read before it writes
    after_backward(begun, rows)         it has returned, and has written the gradients of these rows
    backward_failed(begun)              it has broken off, with an error
    gradients_ready(begun, rows)        everybody has noted that: the gradients can be looked at
    gradients_missed()                  it is not known whether a pass wrote, or it was cut short
    gradients_shared()                  several threads write the same gradients at once
    loss_scaled(scaler)                 a loss was multiplied: the next gradients carry the factor
    gradients_unscaled(scaler, optimizer)   the optimizer's gradients were divided by the factor
    edit_begins()                       torch is about to clip or unscale gradients
    edit_ended(edited, limit)           it has done so: to an optimizer's, or to those of parameters
                                        (limit: what it clipped to; None: it unscaled them)
    scaler_steps(optimizer)             GradScaler.step was called for the optimizer
    scaler_stepped(optimizer)           it has returned; the optimizer may not have been called

Who listens with parameters hears of the ends of passes that wrote some of their gradients, and of
no others: between clipping and the step, backward passes of other models change nothing. Every
moment is told in the thread that it happens in; a listener without parameters may listen to its
own thread alone.

Looking when `torch.autograd.backward` has returned sees the gradient before any clipping, however
that is called, and after any reduction. GradScaler is watched because it multiplies gradients, and
because a step that it leaves out calls no optimizer. torch's clipping functions are watched so that
clipping can be told from other edits of a gradient. Each listener is told through its guard, so
that nothing of ours reaches the training loop. Everything is put back when the last one leaves.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from gradsight.core.calls import SUSPENDED
from gradsight.core.carried import current_task, is_carried
from gradsight.core.function_modes import take_off_ended
from gradsight.core.guard import Guard, lock, put_back
from gradsight.core.passes import PASS, Course, FollowedParameters, Passes
from gradsight.core.uncompiled import keep_compiler_out, not_compiled

MOMENTS = (
    "before_backward",
    "gradients_before",
    "after_backward",
    "backward_failed",
    "gradients_ready",
    "gradients_missed",
    "gradients_shared",
    "loss_scaled",
    "gradients_unscaled",
    "edit_begins",
    "edit_ended",
    "scaler_steps",
    "scaler_stepped",
)

_LIMITS = ("max_norm", "clip_value")
_Original = Callable[..., Any]
"""A function of torch's that one of ours stands in for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ear:
    """One method of a listener's."""

    listener: object
    tell: Callable[..., None]
    """The method, through the guard."""
    followed: FollowedParameters | None
    """The parameters that it listens for; None for all passes."""
    thread: int | None
    """The only thread that it listens to; None for all."""


_told: dict[str, list[_Ear]] = {moment: [] for moment in MOMENTS}
_listeners: list[object] = []
_replaced: list[tuple[Any, Any, tuple[Any, Any]]] = []
"""How each of torch's functions is got and put, ours and the original."""
_passes = Passes()


class _ScaledLosses(threading.local):
    """Losses that a GradScaler has multiplied in this thread."""

    def __init__(self) -> None:
        self.alive: list[tuple[weakref.ref[Tensor], torch.amp.GradScaler]] = []
        self.scaler: torch.amp.GradScaler | None = None
        """The scaler that multiplied a loss for which no backward pass has run yet; else None."""

    def add(self, scaler: torch.amp.GradScaler, result: Any) -> None:
        """Note what `scaler.scale` has returned: a tensor, or a collection of them."""
        self.scaler = scaler
        tensors = [result] if isinstance(result, Tensor) else list(result)
        alive = [each for each in self.alive if each[0]() is not None]
        self.alive = alive + [(weakref.ref(tensor), scaler) for tensor in tensors]


_scaled = _ScaledLosses()


def scaler_of(tensors: Any) -> torch.amp.GradScaler | None:
    """The scaler that returned one of these tensors, on which backward is called; else None."""
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors or ())
    for reference, scaler in _scaled.alive:
        tensor = reference()
        if tensor is not None and any(tensor is root for root in roots):
            return scaler
    return None


def scaler_in_use() -> torch.amp.GradScaler | None:
    """The scaler that multiplied a loss in this thread for which no backward pass has run yet."""
    return _scaled.scaler


def listen(
    listener: object,
    guard: Guard,
    parameters: Sequence[Tensor] | None = None,
    *,
    own_thread: bool = False,
) -> FollowedParameters | None:
    """Tell this listener from now on, through its guard, of every moment it has a method for.

    parameters: whose gradients it is about; what is given back stands for them.
    own_thread: whether it is told only of what happens in the thread that calls this.
    """
    methods = {moment: getattr(listener, moment, None) for moment in MOMENTS}
    if not any(methods.values()):
        raise TypeError(f"{type(listener).__name__} has none of the methods {', '.join(MOMENTS)}")
    thread = get_ident() if own_thread else None
    with lock:
        # Append the listener first: the garbage collector may remove an older one in between, and
        # the last one to leave an empty list restores torch's functions.
        _listeners.append(listener)
        if len(_listeners) == 1:
            _install()
        # Also without `leave`, should that fail: torch's functions are put back by the guard alone.
        for replaced in _replaced:
            guard.at_end(put_back, _listeners, listener, *replaced)
        guard.at_end(leave, listener)
        followed = None
        if parameters is not None:
            followed = _passes.follow(parameters)
        for moment, method in methods.items():
            if method is not None:
                tell = functools.partial(guard.run, method)
                _told[moment].append(_Ear(listener, tell, followed, thread))
    return followed


def leave(listener: object) -> None:
    """Stop telling this listener; the last one to leave puts everything back."""
    with lock:
        leaving = set()
        for ears in _told.values():
            for ear in tuple(ears):
                if ear.listener is listener:
                    ears.remove(ear)
                    leaving.add(ear.followed)
        for followed in leaving:
            if followed is not None:
                _passes.unfollow(followed)
        for replaced in _replaced:
            put_back(_listeners, listener, *replaced)


def inside_backward() -> bool:
    """Whether this code runs inside a backward pass: in a hook, in whatever thread."""
    # Not what is carried alone: an interrupt may have left it behind.
    return current_task() != -1 and is_carried(PASS)


def missed_passes() -> bool:
    """Return whether an internal error hides backward passes; reset when all listeners leave."""
    return _passes.guard.faults > 0


def is_written_elsewhere(followed: FollowedParameters) -> bool:
    """Whether another thread is writing the gradients of these parameters now."""
    return _passes.is_written_elsewhere(followed)


def _install() -> None:
    keep_compiler_out()
    scaler = torch.amp.GradScaler
    global _passes, _scaled
    _passes = Passes()
    _scaled = _ScaledLosses()
    _replaced.clear()
    _replace(torch.autograd, "backward", _watched_backward)
    _replace(scaler, "scale", _watched_scale)
    _replace(scaler, "unscale_", _watched_unscale)
    _replace(scaler, "step", _watched_step)
    # Inside of torch's own wrapper, as users may have imported the functions by name already. The
    # first of them is also what clip_grad_norm_ calls.
    for function in (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_):
        wrapped = inspect.unwrap(function)
        for cell in function.__closure__ or ():
            if cell.cell_contents is wrapped:
                _replace(cell, "cell_contents", _watched_edit)


def _replace(owner: Any, name: str, watched: Callable[[_Original], _Original]) -> None:
    original = getattr(owner, name)
    ours = not_compiled(functools.wraps(original)(watched(original)))
    get = functools.partial(getattr, owner, name)
    put = functools.partial(setattr, owner, name)
    put(ours)
    _replaced.append((get, put, (ours, original)))


# What stands in for torch's functions. The user calls these: nothing of ours is called from here
# but through a guard, for whatever failed would come out of their own backward.


def _watched_backward(original: _Original) -> _Original:
    def backward(*args: Any, **kwargs: Any) -> Any:
        is_nested = current_task() != -1 and is_carried(PASS)  # and so part of another pass
        if not _listeners or is_nested or is_carried(SUSPENDED):
            return original(*args, **kwargs)
        passes = _passes
        course = None
        has_returned = False
        try:
            tensors = args[0] if args else kwargs.get("tensors")
            seeds = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
            keeps = args[2] if len(args) > 2 else kwargs.get("retain_graph")
            if keeps is None:
                keeps = args[3] if len(args) > 3 else kwargs.get("create_graph", False)
            course = passes.guard.run(_begin_pass, passes, tensors, seeds, keeps)
            result = original(*args, **kwargs)
            has_returned = True
        finally:
            passes.guard.run(_end_pass, passes, course, has_returned)
            _scaled.scaler = None
            if passes.guard.faults:
                # Whatever was seen of this step may not be all of it.
                for ear in tuple(_told["gradients_missed"]):
                    ear.tell()
        return result

    return backward


def _begin_pass(passes: Passes, tensors: Any, seeds: Any, keeps_graph: Any) -> Course:
    take_off_ended()
    course = Course(tensors, seeds, bool(keeps_graph))
    # Not a copy: a watch that is opened by one of these is to hear of this pass too.
    for ear in _told["before_backward"]:
        if ear.thread is None or ear.thread == get_ident():
            ear.tell(course.begun)
    passes.begin(course)
    for ear in tuple(_told["gradients_before"]):
        if ear.followed is not None and course.before.get(ear.followed):
            ear.tell(course.begun)
    return course


def _end_pass(passes: Passes, course: Course | None, has_returned: bool) -> None:
    passes.end(course)
    if course is None:
        return
    if has_returned:
        for moment in ("after_backward", "gradients_ready"):
            # Copies: a listener may leave while it is told.
            for ear in tuple(_told[moment]):
                if ear.followed is None:
                    ear.tell(course.begun, ())
                elif ear.followed in course.written:
                    ear.tell(course.begun, course.written[ear.followed])
    else:
        # It may have written some gradients, and somebody may go on with them.
        course.missed.update(course.written)
        for ear in tuple(_told["backward_failed"]):
            if ear.thread is None or ear.thread == get_ident():
                ear.tell(course.begun)
    if course.missed:
        _tell_what_was_missed(course.missed)


def _tell_what_was_missed(missed: Collection[FollowedParameters | None]) -> None:
    for ear in tuple(_told["gradients_missed"]):
        if ear.followed in missed:
            ear.tell()
    for ear in tuple(_told["gradients_shared"]):
        if ear.followed in missed and ear.followed is not None and ear.followed.is_shared:
            ear.tell()


def _watched_scale(original: _Original) -> _Original:
    def scale(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled() and not is_carried(SUSPENDED):
            _passes.guard.run(_scaled.add, scaler, result)
            for ear in tuple(_told["loss_scaled"]):
                if ear.thread in (None, get_ident()):
                    ear.tell(scaler)
        return result

    return scale


def _watched_unscale(original: _Original) -> _Original:
    def unscale_(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Any:
        if not scaler.is_enabled() or is_carried(SUSPENDED):
            return original(scaler, optimizer)
        for ear in tuple(_told["edit_begins"]):
            if ear.thread in (None, get_ident()):
                ear.tell()
        try:
            result = original(scaler, optimizer)
        finally:
            for ear in tuple(_told["edit_ended"]):
                if ear.thread in (None, get_ident()):
                    ear.tell(optimizer, None)
        for ear in tuple(_told["gradients_unscaled"]):
            if ear.thread in (None, get_ident()):
                ear.tell(scaler, optimizer)
        return result

    return unscale_


def _watched_edit(original: _Original) -> _Original:
    def edit(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if is_carried(SUSPENDED):
            return original(parameters, *args, **kwargs)
        # Under different names: max_norm, clip_value.
        limit = (
            args[0] if args else next((kwargs[name] for name in _LIMITS if name in kwargs), None)
        )
        if isinstance(parameters, Iterator):
            parameters = list(parameters)  # torch and the listeners both go through them
        for ear in tuple(_told["edit_begins"]):
            if ear.thread in (None, get_ident()):
                ear.tell()
        try:
            return original(parameters, *args, **kwargs)
        finally:
            for ear in tuple(_told["edit_ended"]):
                if ear.thread in (None, get_ident()):
                    ear.tell(parameters, limit)

    return edit


def _watched_step(original: _Original) -> _Original:
    def step(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled() or is_carried(SUSPENDED):
            return original(scaler, optimizer, *args, **kwargs)
        for ear in tuple(_told["scaler_steps"]):
            ear.tell(optimizer)
        result = original(scaler, optimizer, *args, **kwargs)
        for ear in tuple(_told["scaler_stepped"]):
            ear.tell(optimizer)
        return result

    return step
