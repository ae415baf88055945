"""What a judge wants to know beyond gradients: the loss, whether gradients were cleared, whether
batches are always the same.

All of it is noticed in passing: references and version numbers on every step, a few hundred entries
of the batch on a few.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import moments as interception
from gradsight.core.autocast import is_autocast_to
from gradsight.core.calls import is_suspended
from gradsight.core.hooks import ModuleHook
from gradsight.core.samples import tensors_in
from gradsight.session.guess import loss_of_a_guess

_GUESSES = 12
"""Backward passes whose loss is compared with a guess's: those of the first steps."""
_BATCHES = 12
"""Batches compared with the one before; then the model is left alone."""
_ENTRIES = 256
_TENSORS = 4


class Vitals:
    """Watches one model; `uncleared`, `alike`, `half` and `take_loss()` say what was noticed."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers, self._handles = optimizers, list[Any]()
        self._evaluations: int | None = None  # of the closure that an optimizer is stepping with
        self._clearing = [Clearing(optimizer) for optimizer in optimizers]
        self._batches = Batches()
        self._handle: Any = None
        self._loss: Tensor | None = None
        self._guesses = 0
        self.guess: float | None = None
        """What the loss of one of the first backward passes would have been without any knowledge.
        """
        self.half: bool | None = None
        """Whether the last forward pass ran under float16 autocast."""

    def start(self) -> None:
        """Begin to watch."""
        interception.around_backward(self._before_backward, self._after_backward)
        for optimizer, clearing in zip(self._optimizers, self._clearing, strict=True):
            clearing.start()
            self._handles.append(optimizer.register_step_pre_hook(self._step_begins))
            self._handles.append(optimizer.register_step_post_hook(self._step_ends))
        if (
            getattr(self._model, "_compiled_call_impl", None) is None
        ):  # hooks inside a compiled call would break its graph
            self._handle = self._model.register_forward_pre_hook(
                ModuleHook(self._on_forward), with_kwargs=True
            )

    def stop(self) -> None:
        """Leave everything as it was found."""
        interception.around_backward(self._before_backward, self._after_backward, wanted=False)
        for clearing in self._clearing:
            clearing.stop()
        while self._handles:
            self._handles.pop().remove()
        self._leave_model()

    @property
    def uncleared(self) -> bool | None:
        """Whether some optimizer last stepped on gradients that nobody had cleared; None where none
        has stepped twice.
        """
        known = [
            clearing.uncleared for clearing in self._clearing if clearing.uncleared is not None
        ]
        return any(known) if known else None

    @property
    def alike(self) -> int | None:
        """How many batches in a row were the same, made anew; None where no batch was seen."""
        return self._batches.alike

    @property
    def fixed(self) -> bool:
        """Whether every batch seen was the first one again, in the same tensors or in new ones."""
        return self._batches.fixed

    def take_loss(self) -> Tensor | None:
        """What the last backward pass was called on, if that was a single number; once."""
        loss, self._loss = self._loss, None
        return loss

    def take_guess(self) -> float | None:
        """The same for what a guess would have given; once."""
        guess, self.guess = self.guess, None
        return guess

    def _step_begins(self, *_: Any) -> None:
        self._evaluations = 0

    def _step_ends(self, *_: Any) -> None:
        self._evaluations = None

    def _before_backward(self, tensors: Any) -> None:
        if self._evaluations is not None:
            self._evaluations += 1
        if (self._evaluations or 0) <= 1:  # a step starts from the first evaluation of its closure
            self._note_loss(tensors)
        for clearing in self._clearing:
            clearing.before_backward()

    def _note_loss(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        if len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].numel() == 1:
            self._loss = roots[0].detach()
            if self._guesses < _GUESSES:
                self.guess, self._guesses = loss_of_a_guess(roots[0]), self._guesses + 1

    def _after_backward(self) -> None:
        for clearing in self._clearing:
            clearing.after_backward()

    def _on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called with these arguments. After a few batches enough has been seen."""
        if not self._model.training or is_suspended():
            return
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self.half = is_autocast_to(torch.float16)
        self._batches.see((*args, *kwargs.values()))
        if self._batches.count >= _BATCHES:
            self._leave_model()

    def _leave_model(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class Clearing:
    """Whether an optimizer's gradients are cleared between its steps, told by its smallest one.

    Clearing puts another tensor (or None) in the place of `.grad`, or changes it in place, which
    raises its version. If it is the same at the beginning of every backward pass as when we last
    looked, nobody has touched it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameter: Tensor | None = None
        self._left: tuple[weakref.ref[Tensor], int] | None = (
            None  # the gradient when we last looked
        )
        self._cleared = False
        self._passes = 0
        self._handle: Any = None
        self.uncleared: bool | None = None

    def start(self) -> None:
        """Begin to watch the optimizer's steps."""
        self._handle = self._optimizer.register_step_post_hook(self._stepped)

    def stop(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()
        self._parameter = None

    def before_backward(self) -> None:
        """A backward pass is about to add to the gradients."""
        if self._parameter is None or self._cleared:
            return
        now = self._parameter.grad
        touched = (
            now is None
            or self._left is None
            or now is not self._left[0]()
            or now._version != self._left[1]
        )
        self._cleared = touched or (
            self._passes == 0 and now is not None and not bool((now != 0).any())
        )

    def after_backward(self) -> None:
        """A backward pass may have added to them."""
        self._passes += 1
        self._look()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if interception.inside_backward():
            return
        if self._parameter is not None and self._passes:
            self.uncleared = not self._cleared
        if self._parameter is None or self._parameter.grad is None:
            candidates = [
                p
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None and p.numel()
            ]
            dense = [p for p in candidates if p.grad.layout is torch.strided]
            self._parameter = min(dense, key=lambda p: p.numel(), default=None)
        self._cleared, self._passes = False, 0
        self._look()

    def _look(self) -> None:
        gradient = self._parameter.grad if self._parameter is not None else None
        self._left = (weakref.ref(gradient), gradient._version) if gradient is not None else None


class Batches:
    """Compares each batch with the one before."""

    def __init__(self) -> None:
        self.count = 0
        self._before: list[Tensor] = []
        self._objects: list[Callable[[], Tensor | None]] = []
        self.alike: int | None = None
        self.fixed = False
        """Whether there has only been one, on purpose or not."""

    def see(self, values: Sequence[Any]) -> None:
        """A batch comes by."""
        self.count += 1
        tensors = _tensors(values)
        if not tensors:
            return
        samples = [_sample(tensor) for tensor in tensors]
        same_objects = len(tensors) == len(self._objects) and all(
            one is other() for one, other in zip(tensors, self._objects, strict=True)
        )
        alike = (
            not same_objects
            and len(samples) == len(self._before)
            and all(
                one.shape == other.shape and torch.equal(one, other)
                for one, other in zip(samples, self._before, strict=True)
            )
            and any(sample.numel() > 1 and bool((sample != sample[0]).any()) for sample in samples)
        )
        self.alike = (self.alike or 0) + 1 if alike else 0
        self.fixed = self.count > 1 and (alike or same_objects) and (self.fixed or self.count == 2)
        self._before, self._objects = samples, [weakref.ref(tensor) for tensor in tensors]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The first few tensors that can be compared."""
    tensors = tensors_in(*values)
    return [each for each in tensors if each.numel() and each.layout is torch.strided][:_TENSORS]


def _sample(tensor: Tensor) -> Tensor:
    """Up to 256 entries, spread over the tensor."""
    with torch.no_grad():
        entries = tensor.detach().reshape(-1)
        return entries[:: max(1, entries.numel() // _ENTRIES)][:_ENTRIES].clone()
