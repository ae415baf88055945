"""What a judge wants to know beyond gradients, noticed in passing.

The loss, whether gradients were cleared, whether batches are always the same: references and
version numbers on every step, a few hundred entries of the batch on a few.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.autocast import is_autocast_to
from gradsight.core.calls import is_suspended
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_hook, put_module_hook
from gradsight.core.passes import BackwardPass, pass_under_way
from gradsight.core.samples import tensors_in
from gradsight.first_step.recorder import called_modules
from gradsight.measure.host_copy import HostCopy
from gradsight.session.first_look import FirstLook
from gradsight.session.guess import TargetCounts, TargetFrequencies, loss_of_a_guess, target_counts
from gradsight.session.step_passes import PassesOnTheWay
from gradsight.values.measured import StepSignals

_GUESSES = 12
"""Backward passes whose loss is compared with a guess's: those of the first steps."""
_BATCHES = 12
"""Batches compared with the one before; then the model is left alone."""
_ENTRIES = 256
_TENSORS = 4
_Noted = tuple[Tensor, float | HostCopy | None, TargetCounts | None]
"""The loss of a backward pass, that of a guess, and its targets."""


@dataclass(frozen=True, slots=True)
class SeenLoss:
    """The loss of a step, and what else is on the device still: what it would be by a guess."""

    loss: Tensor | None = None
    guess: float | HostCopy | None = None
    unigram: float | HostCopy | None = None
    """What it would be if the model knew the frequencies alone; of one step of a run."""
    passes: PassesOnTheWay | None = None
    """What the step's backward passes were like."""


def _on_its_way(number: float | Tensor | None) -> float | HostCopy | None:
    return HostCopy.of(number.reshape(1)) if isinstance(number, Tensor) else number


class TrainingSignals:
    """Watches one model and its optimizers; `take` gives what was noticed during a step."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        guard: Guard,
        first_look: FirstLook | None = None,
        unseen: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """`unseen`: signals that will not come, each with the reason."""
        self._model = model
        self._parameters = parameters
        self._optimizers = optimizers
        self.guard = guard
        self.first_look = first_look
        self._unseen = unseen
        self._evaluations: int | None = None  # of the closure that an optimizer is stepping with
        self._clearing = [Clearing(optimizer, guard) for optimizer in optimizers]
        self._batches = Batches()
        self._forward_handles: dict[nn.Module, Any] = {}
        self._loss: Tensor | None = None
        self._guesses = 0
        self._guess: float | HostCopy | None = None
        self._targets = TargetFrequencies()
        self._unigram: float | HostCopy | None = None
        self._half: bool | None = None

    def start(self) -> None:
        """Begin to watch."""
        moments.listen(self, self.guard, self._parameters)
        if self.first_look is not None:
            self.first_look.guard.run(self.first_look.start)
        for optimizer, clearing in zip(self._optimizers, self._clearing, strict=True):
            clearing.start()
            put_hook(self.guard, optimizer.register_step_pre_hook, self._step_begins)
            put_hook(self.guard, optimizer.register_step_post_hook, self._step_ends)
        # Hooks inside a compiled call would break its graph.
        if getattr(self._model, "_compiled_call_impl", None) is None:
            for module in {self._model: None, _largest_part(self._model): None}:
                self._forward_handles[module] = put_module_hook(
                    self.guard,
                    module.register_forward_pre_hook,
                    partial(self._on_forward, module),
                    with_kwargs=True,
                )

    @property
    def loss(self) -> Tensor | None:
        """What the last backward pass of the step under way was called on; on the device still."""
        return self._loss

    def batch(self) -> list[HostCopy]:
        """Samples of the newest batch, on their way to the host."""
        return [HostCopy.of(sample) for sample in self._batches.newest]

    def look_away(self) -> None:
        """Notice nothing more, but leave the hooks in place."""
        moments.leave(self)
        if self.first_look is not None:
            self.first_look.guard.attempt(self.first_look.stop)
            self.first_look = None
        for clearing in self._clearing:
            clearing.look_away()

    def take(self) -> tuple[StepSignals, "SeenLoss"]:
        """What was noticed in the step that has just ended; its loss is still on the device."""
        made_by = pass_under_way()
        if made_by is not None:  # an optimizer that steps inside backward
            self._note_loss(made_by)
        self._batches.read_arrived()
        loss = self._loss
        guess = self._guess
        self._loss = None
        unigram = self._unigram
        self._guess = None
        self._unigram = None
        first = passes = None
        unseen = self._unseen
        if self.first_look is not None:
            taken = self.first_look.guard.run(self.first_look.take)
            first, passes = taken or (None, None)
            unseen = self.first_look.unseen()
        signals = StepSignals(
            uncleared=self._uncleared(),
            alike_batches=self._batches.alike,
            half=self._half,
            one_batch=self._batches.fixed,
            first=first,
            unseen=unseen,
        )
        return signals, SeenLoss(loss, guess, unigram, passes)

    def _uncleared(self) -> bool | None:
        """Whether some optimizer last stepped on gradients that nobody had cleared."""
        known = [each.uncleared for each in self._clearing if each.uncleared is not None]
        return any(known) if known else None

    # What torch tells.

    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass begins, of this model or of another."""
        tensors = begun.tensors
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        if len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].numel() == 1:
            guess = None
            targets = None
            if self._guesses < _GUESSES:
                # Now: backward frees what the guess is read from.
                guess = _on_its_way(loss_of_a_guess(roots[0]))
                targets = target_counts(roots[0])
            # Whether the loss is of this model is known when the pass has ended.
            begun.notes[self] = (roots[0].detach(), guess, targets)

    def gradients_before(self, begun: BackwardPass) -> None:
        """Its gradients can be read, and are not written yet."""
        for clearing in self._clearing:
            clearing.before_backward(begun)

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """It has returned, and was of this model."""
        if self._evaluations is not None:
            self._evaluations += 1
        # A step starts from the first evaluation of its closure.
        if (self._evaluations or 0) <= 1:
            self._note_loss(begun)
        for clearing in self._clearing:
            clearing.after_backward(begun)

    def _on_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """The model is called with these arguments. After a few batches enough has been seen."""
        if not module.training or is_suspended():
            return
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._leave_modules(but=module)
        self._half = is_autocast_to(torch.float16)
        self._batches.see((*args, *kwargs.values()))
        if self._batches.count >= _BATCHES:
            self._leave_modules()

    def _step_begins(self, *_: Any) -> None:
        self._evaluations = 0

    def _step_ends(self, *_: Any) -> None:
        self._evaluations = None

    def _note_loss(self, begun: BackwardPass) -> None:
        noted: _Noted | None = begun.notes.pop(self, None)
        if noted is None:
            return
        self._loss = noted[0]
        if self._guesses < _GUESSES:
            self._guess = noted[1]
            self._guesses += 1
            self._targets.add(noted[2])
            if self._guesses == _GUESSES:
                self._unigram = _on_its_way(self._targets.entropy())
                self._targets = TargetFrequencies()

    def _leave_modules(self, but: nn.Module | None = None) -> None:
        for module in [each for each in self._forward_handles if each is not but]:
            self._forward_handles.pop(module).remove()


def _largest_part(model: nn.Module) -> nn.Module:
    """Return what a script calls in place of the model, as Lightning's modules are never called.

    That is the part with at least half of the parameters; without one, the model.
    """
    size = sum(each.numel() for each in model.parameters())
    for part in called_modules(model)[1:]:
        if 2 * sum(each.numel() for each in part.parameters()) >= size:
            return part
    return model


class Clearing:
    """Whether an optimizer's gradients are cleared between its steps, told by its smallest one.

    Clearing puts another tensor (or None) in the place of `.grad`, or changes it in place, which
    raises its version. If it is the same at the beginning of every backward pass as when we last
    looked, nobody has touched it.
    """

    def __init__(self, optimizer: Optimizer, guard: Guard) -> None:
        self._optimizer = optimizer
        self._guard = guard
        self._parameter: Tensor | None = None
        # The gradient when we last looked, and its version.
        self._left: tuple[weakref.ref[Tensor], int] | None = None
        self._cleared = False
        # Whether the gradient was all zero when a pass began; of this step, and of the one before.
        self._zeros: HostCopy | None = None
        self._undecided: HostCopy | None = None
        self._passes = 0
        self._looks_away = False
        self.uncleared: bool | None = None

    def start(self) -> None:
        """Begin to watch the optimizer's steps."""
        put_hook(self._guard, self._optimizer.register_step_post_hook, self._stepped)

    def look_away(self) -> None:
        """Read no gradient any more."""
        self._looks_away = True
        self._parameter = None

    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass may be about to add to the gradients."""
        if self._parameter is None or self._cleared:
            return
        gradient = self._parameter.grad
        touched = self._was_touched(gradient)
        # Zeros that were always there look untouched, and are as good as cleared.
        if not touched and self._passes == 0 and gradient is not None:
            begun.notes[self] = HostCopy.of((gradient.detach() == 0).all().reshape(1))
            return
        begun.notes[self] = touched

    def after_backward(self, begun: BackwardPass) -> None:
        """It has added to them. Where there were none, or nobody could look, all is well."""
        cleared: bool | HostCopy = begun.notes.get(self, True)
        if isinstance(cleared, HostCopy):
            self._zeros = cleared
        else:
            self._cleared = self._cleared or cleared
        self._passes += 1
        self._look()

    def _was_touched(self, gradient: Tensor | None) -> bool:
        if gradient is None or self._left is None:
            return True
        return gradient is not self._left[0]() or gradient._version != self._left[1]

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        # An optimizer inside backward clears each gradient by itself.
        if self._looks_away or moments.inside_backward():
            return
        if self._parameter is not None and self._passes:
            gradient = self._parameter.grad
            # Replaced after the last pass: what passes have added up is not what was used.
            if self._left is not None and gradient is not self._left[0]():
                self._cleared = True
            self._judge()
        if self._parameter is None or self._parameter.grad is None:
            self._parameter = _smallest_dense(optimizer)
        self._cleared = False
        self._passes = 0
        self._look()

    def _judge(self) -> None:
        """Say whether gradients were cleared; what is on its way says so a step later."""
        if self._cleared or self._zeros is None:
            self._undecided = None
            self.uncleared = not self._cleared
        else:
            before = self._undecided
            self._undecided = self._zeros
            if not self._zeros.is_from_device:
                before = self._zeros
            if before is not None:
                self.uncleared = not before.number()
        self._zeros = None

    def _look(self) -> None:
        gradient = self._parameter.grad if self._parameter is not None else None
        self._left = None
        if gradient is not None:
            self._left = (weakref.ref(gradient), gradient._version)


def _smallest_dense(optimizer: Optimizer) -> Tensor | None:
    """The smallest parameter with a dense gradient that is not empty."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    with_gradient = [each for each in parameters if each.grad is not None and each.numel()]
    dense = [each for each in with_gradient if each.grad.layout is torch.strided]
    return min(dense, key=lambda parameter: parameter.numel(), default=None)


class Batches:
    """Compares each batch with the one before."""

    def __init__(self) -> None:
        self.count = 0
        self.newest: list[Tensor] = []
        """Samples of the tensors of the last batch."""
        self._holders: list[Callable[[], Tensor | int | None]] = []
        self._unread: deque[tuple[int, bool, list[HostCopy] | None]] = deque()
        """Comparisons on their way: the batch's number, whether it is the same object, flags."""
        self.alike: int | None = None
        """How many batches in a row were the same, made anew; None where none was seen."""
        self.fixed = False
        """Whether there has only been one, on purpose or not."""

    def see(self, values: Sequence[Any]) -> None:
        """A batch comes by."""
        self.count += 1
        tensors = _tensors(values)
        if not tensors:
            return
        # Objects as well as entries: a loop that overfits one batch on purpose hands in the same
        # tensors, a loader that does not advance makes them anew.
        samples = [_sample(tensor) for tensor in tensors]
        holders = [_holder(tensor) for tensor in tensors]
        same_objects = self._are_the_same_objects(holders)
        flags = None if same_objects else self._compared(samples)
        self._unread.append((self.count, same_objects, flags))
        self.newest = samples
        self._holders = holders
        self.read_arrived()

    def read_arrived(self) -> None:
        """Take in the comparisons that have come from the device, in their order."""
        while self._unread and all(flag.ready() for flag in self._unread[0][2] or ()):
            number, same_objects, flags = self._unread.popleft()
            # Batches of one value only tell nothing.
            equal, varied = _both(flags)
            alike = not same_objects and equal and varied
            self.alike = (self.alike or 0) + 1 if alike else 0
            seen_before = alike or same_objects
            self.fixed = number > 1 and seen_before and (self.fixed or number == 2)

    def _are_the_same_objects(self, holders: Sequence[Callable[[], Tensor | int | None]]) -> bool:
        if len(holders) != len(self._holders):
            return False
        for one, other in zip(holders, self._holders, strict=True):
            new, old = one(), other()
            if not (new is old or (isinstance(new, int) and isinstance(old, int) and new == old)):
                return False
        return True

    def _compared(self, samples: Sequence[Tensor]) -> list[HostCopy] | None:
        """Of each sample: whether it is that of the batch before, and has several values.

        None where the batches cannot be the same.
        """
        if len(samples) != len(self.newest):
            return None
        flags = []
        for one, other in zip(samples, self.newest, strict=True):
            if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
                return None
            # Compared on the device: torch.equal() would wait for it.
            flags.append(HostCopy.of(torch.stack([(one == other).all(), (one != one[0]).any()])))
        return flags


def _holder(tensor: Tensor) -> Callable[[], Tensor | int | None]:
    """Return what holds the memory of a batch: a script that trains on all its data keeps it.

    That is the tensor itself, the tensor that it is another view of, or an array of numpy.
    """
    base = tensor._base
    if base is not None and base.numel() == tensor.numel():
        return weakref.ref(base)
    if type(tensor) is Tensor and tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        # torch cannot resize the memory of an array. Nor can it resize what a loader's worker
        # shares, but the next batch of a worker may lie at the same address.
        if not storage.resizable() and not storage.is_shared():
            address = tensor.data_ptr()
            return lambda: address
    return weakref.ref(tensor)


def _both(flags: Sequence[HostCopy] | None) -> tuple[bool, bool]:
    """Whether all samples are as before, and whether one has several values."""
    if not flags:
        return False, False
    read = [flag.read() for flag in flags]
    return all(equal for equal, _ in read), any(varied for _, varied in read)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The first few tensors that can be compared."""
    tensors = tensors_in(*values)
    return [each for each in tensors if each.numel() and each.layout is torch.strided][:_TENSORS]


def _sample(tensor: Tensor) -> Tensor:
    """Up to 256 entries, spread over the tensor."""
    with torch.no_grad():
        entries = tensor.detach().reshape(-1)
        return entries[:: max(1, entries.numel() // _ENTRIES)][:_ENTRIES].clone()
