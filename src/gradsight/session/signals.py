"""What a judge wants to know beyond gradients, noticed in passing.

The loss, whether gradients were cleared, whether batches are always the same: references and
version numbers on every step, a few hundred entries of the batch on a few.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradsight.core import moments
from gradsight.core.autocast import is_autocast_to
from gradsight.core.beside import called_modules
from gradsight.core.calls import is_suspended
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_hook, put_module_hook
from gradsight.core.open_watches import count_open
from gradsight.core.optimizers import is_inside_another_step, parameters_of
from gradsight.core.passes import (
    BackwardPass,
    GradientState,
    gradient_state,
    is_same,
    pass_under_way,
)
from gradsight.core.samples import tensors_in
from gradsight.core.shards import local_part
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
        self._unreached = set(range(len(parameters)))
        self._reached: set[int] = set()
        self._clearing = [Clearing(optimizer, guard) for optimizer in optimizers]
        self._repeated: RepeatedUpdates | None = None
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
        if len(self._optimizers) > 1:
            self.compare_optimizers()
        for optimizer, clearing in zip(self._optimizers, self._clearing, strict=True):
            self._start_with(optimizer, clearing)
        # Hooks inside a compiled call would break its graph.
        if getattr(self._model, "_compiled_call_impl", None) is None:
            for module in {self._model: None, _largest_part(self._model): None}:
                self._forward_handles[module] = put_module_hook(
                    self.guard,
                    module.register_forward_pre_hook,
                    partial(self._on_forward, module),
                    with_kwargs=True,
                )

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Watch one more; it takes the place of those with no other parameters."""
        given = parameters_of(optimizer)
        stay = [each for each in self._clearing if parameters_of(each.optimizer) - given]
        clearing = Clearing(optimizer, self.guard)
        self._clearing = [*stay, clearing]
        self._start_with(optimizer, clearing)
        self.compare_optimizers()

    def compare_optimizers(self) -> None:
        """Notice parameters that two optimizers update by the same gradient."""
        if self._repeated is None:
            self._repeated = RepeatedUpdates(self._parameters)
            put_hook(self.guard, register_optimizer_step_post_hook, self._repeated.stepped)

    def _start_with(self, optimizer: Optimizer, clearing: "Clearing") -> None:
        clearing.start()
        put_hook(self.guard, optimizer.register_step_pre_hook, self._step_begins)
        put_hook(self.guard, optimizer.register_step_post_hook, self._step_ends)

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
            if self.first_look.guard.faults:
                unseen = self.first_look.unseen()
        twice, in_vain = ((), ()) if self._repeated is None else self._repeated.take()
        uncleared = self._uncleared()
        reached = tuple(self._reached)
        self._reached.clear()
        signals = StepSignals(
            reached=reached,
            updated_twice=twice,
            held_in_vain=in_vain,
            uncleared=uncleared,
            is_one_of_several=bool(uncleared) and count_open() > 1,
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
        if self._unreached:
            new = self._unreached.intersection(rows)
            self._unreached -= new
            self._reached |= new
        if self._repeated is not None:
            self._repeated.since_pass.clear()

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


_EMPTY_STEPS = 10
"""After this many steps without a gradient, Gradsight assumes that none will come."""


class RepeatedUpdates:
    """Notices parameters that two optimizers update by the same gradient.

    That two optimizers hold a parameter says nothing: one may wrap the other, take its place in
    the middle of a run, or have a backward pass of its own.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._row_of = {id(tensor): row for row, tensor in enumerate(parameters)}
        self._rows: dict[int, tuple[weakref.ref[Optimizer], int, frozenset[int]]] = {}
        """By id, how many parameters an optimizer held when its rows were found, and these."""
        self.since_pass: dict[int, frozenset[int]] = {}
        """The rows of each optimizer that has stepped since the last backward pass."""
        self._found: set[int] = set()
        self._empty_steps: Counter[int] = Counter()
        """How many steps an optimizer has made without a gradient, until it finds one."""
        self._fed: set[int] = set()
        """Optimizers that have found a gradient."""
        self._in_vain: set[int] = set()

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the rows found since the last call: updated twice, and held in vain."""
        found = tuple(sorted(self._found)), tuple(sorted(self._in_vain))
        self._found.clear()
        self._in_vain.clear()
        return found

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Any optimizer of the process has stepped."""
        # A step inside of another optimizer's step is a part of that one.
        if moments.inside_backward() or is_inside_another_step():
            return
        rows = self._rows_of(optimizer)
        for other, updated in self.since_pass.items():
            if other != id(optimizer):
                self._found |= updated & rows
        if rows:
            self.since_pass[id(optimizer)] = rows
            if id(optimizer) not in self._fed:
                self._look_for_gradients(optimizer, rows)

    def _look_for_gradients(self, optimizer: Optimizer, rows: frozenset[int]) -> None:
        key = id(optimizer)
        held = (tensor for group in optimizer.param_groups for tensor in group["params"])
        if any(tensor.grad is not None for tensor in held):
            self._fed.add(key)
            return
        self._empty_steps[key] += 1
        if self._empty_steps[key] == _EMPTY_STEPS:
            for other, (reference, _, held_by_other) in self._rows.items():
                if other in self._fed and reference() is not None:
                    self._in_vain |= rows & held_by_other

    def _rows_of(self, optimizer: Optimizer) -> frozenset[int]:
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._rows.get(id(optimizer))
        if known is not None and known[0]() is optimizer and known[1] == size:
            return known[2]
        if known is None or known[0]() is not optimizer:
            # This id may be that of an optimizer that is gone.
            self._fed.discard(id(optimizer))
            self._empty_steps.pop(id(optimizer), None)
        held = parameters_of(optimizer)
        rows = frozenset(row for key, row in self._row_of.items() if key in held)
        self._rows[id(optimizer)] = (weakref.ref(optimizer), size, rows)
        return rows


class Clearing:
    """Whether an optimizer's gradients are cleared between its steps, told by its smallest one.

    Clearing puts another tensor (or None) in the place of `.grad`, or changes it in place, which
    raises its version. If it is the same at the beginning of every backward pass as when we last
    looked, nobody has touched it.
    """

    def __init__(self, optimizer: Optimizer, guard: Guard) -> None:
        self.optimizer = optimizer
        self._guard = guard
        self._parameter: Tensor | None = None
        # The gradient when we last looked, and its version.
        self._left: GradientState | None = None
        self._cleared = False
        # Whether the gradient was all zero when a pass began; of this step, and of the one before.
        self._zeros: HostCopy | None = None
        self._undecided: HostCopy | None = None
        self._passes = 0
        self._looks_away = False
        self.uncleared: bool | None = None

    def start(self) -> None:
        """Begin to watch the optimizer's steps."""
        put_hook(self._guard, self.optimizer.register_step_post_hook, self._stepped)

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
            # Read only the local part of a DTensor, because reading all of it needs all ranks.
            values = local_part(gradient.detach())
            begun.notes[self] = HostCopy.of((values == 0).all().reshape(1))
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
        if type(gradient) is Tensor:  # as in almost every run: one call less
            return gradient is not self._left[0]() or gradient._version != self._left[1]
        return not is_same(gradient, self._left)

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
        if type(gradient) is Tensor:
            self._left = (weakref.ref(gradient), gradient._version)
        else:
            self._left = gradient_state(gradient)


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
        self._holders: list[_Holder] = []
        self._unread: deque[tuple[int, _Comparison]] = deque()
        """Comparisons on their way, by the number of their batch."""
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
        samples = [_sample(tensor) for tensor in tensors]
        holders = [_holder(tensor) for tensor in tensors]
        self._unread.append((self.count, self._compared(samples, holders)))
        self.newest = samples
        self._holders = holders
        self.read_arrived()

    def read_arrived(self) -> None:
        """Take in the comparisons that have come from the device, in their order."""
        while self._unread and self._unread[0][1].ready():
            number, comparison = self._unread.popleft()
            equal, held = comparison.read()
            self.alike = (self.alike or 0) + 1 if equal and not held else 0
            self.fixed = number > 1 and (equal or held) and (self.fixed or number == 2)

    def _compared(self, samples: Sequence[Tensor], holders: Sequence["_Holder"]) -> "_Comparison":
        if len(samples) != len(self.newest):
            return _Comparison()
        same_objects = [
            _is_same(one(), other()) for one, other in zip(holders, self._holders, strict=True)
        ]
        if all(same_objects):
            return _Comparison(same_objects)
        flags = []
        for one, other in zip(samples, self.newest, strict=True):
            if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
                return _Comparison()
            # Compared on the device: torch.equal() would wait for it.
            flags.append(HostCopy.of(torch.stack([(one == other).all(), (one != one[0]).any()])))
        return _Comparison(same_objects, flags)


_Holder = Callable[[], Tensor | int | None]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """How the tensors of a batch compare with those of the batch before, in their order."""

    same_objects: Sequence[bool] = ()
    flags: Sequence[HostCopy] = ()
    """Of each tensor, whether its values are those of the batch before, and whether they differ."""

    def ready(self) -> bool:
        """Whether the flags have arrived."""
        return all(flag.ready() for flag in self.flags)

    def read(self) -> tuple[bool, bool]:
        """Return whether the batches are equal, and whether the script keeps the batch on purpose.

        A loop that overfits one batch on purpose hands in the same tensors; a loader that does not
        advance creates them again. Tensors of one value, such as an initial state, decide neither.
        """
        if not self.flags:
            return False, bool(self.same_objects)
        read = [flag.read().tolist() for flag in self.flags]
        equal = all(bool(same) for same, _ in read) and any(bool(varied) for _, varied in read)
        kept = [
            is_same and bool(varied)
            for is_same, (_, varied) in zip(self.same_objects, read, strict=True)
        ]
        return equal, any(kept) and equal


def _is_same(one: Tensor | int | None, other: Tensor | int | None) -> bool:
    """Whether two holders hold the same memory."""
    return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def _holder(tensor: Tensor) -> _Holder:
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


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The first few tensors that can be compared."""
    tensors = tensors_in(*values)
    return [each for each in tensors if each.numel() and each.layout is torch.strided][:_TENSORS]


def _sample(tensor: Tensor) -> Tensor:
    """Up to 256 entries, spread over the tensor."""
    with torch.no_grad():
        entries = tensor.detach().reshape(-1)
        return entries[:: max(1, entries.numel() // _ENTRIES)][:_ENTRIES].clone()
