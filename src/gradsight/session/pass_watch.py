"""What the backward passes of a step were like: from which line, of which loss, in which mode.

Looked at in the first steps, and again now and then: a model is most often left in evaluation mode
by its first validation. What the device alone knows is noted, and read with the step's numbers.
"""

import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsight.core import moments
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_hook
from gradsight.core.loss_graph import form_of
from gradsight.core.passes import BackwardPass
from gradsight.core.shards import is_sharded
from gradsight.core.source import users_frames, working_line
from gradsight.first_step.checkpoints import CutCheckpoints
from gradsight.first_step.modes import evaluating_parts
from gradsight.first_step.recorder import NOTE, SeenPass
from gradsight.measure.host_copy import HostCopy, loss_scale
from gradsight.session.step_passes import (
    Caller,
    Lines,
    NotedGap,
    NotedPass,
    PassesOnTheWay,
    PassHistory,
)

_FIRST = 4
_AGAIN = 25
"""Steps that are looked at: the first, and two in every so many."""
_FRAMES = 4
_GONE = "gradsight.gone"
"""Under this name a pass carries whether the gradient of the one before was gone when it began."""
_MOST = 512
"""Passes of a step, and gaps between them, that are noted."""


class PassWatch:
    """Watches the passes that write a model's gradients."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        guard: Guard,
    ) -> None:
        # Others rescale: their steps are as long for a sum as for a mean.
        self._history = PassHistory(any("SGD" in type(each).__name__ for each in optimizers))
        self._model = model
        self._parameters = parameters
        self._guard = guard
        self._steps = 0
        self._noted: list[NotedPass | NotedGap] = []
        self._modes: dict[str, str] | None = None
        self._scale: HostCopy | None = None
        self._left: _Left | None = None
        self._is_used = False
        self._missed: bool | HostCopy = False
        """Whether an optimizer steps without the gradients that were left for it."""
        self._inside_step = False
        self._threads: set[int] = set()
        self._checkpoints = CutCheckpoints(guard)

    def start(self) -> None:
        """Begin to watch."""
        # The first watched backward pass may run inside a closure.
        self._inside_step = _is_inside_step()
        moments.listen(self, self._guard, self._parameters)
        put_hook(self._guard, register_optimizer_step_pre_hook, self._step_begins)
        put_hook(self._guard, register_optimizer_step_post_hook, self._step_ends)
        self._checkpoints.start()

    def stop(self) -> None:
        """Leave everything as it was found."""
        moments.leave(self)
        self._left = None

    def take(self) -> PassesOnTheWay | None:
        """What the step that has just ended was made of; None where nobody looked."""
        self._note_missed()
        if not self._looks():
            self._steps += 1
            return None
        self._steps += 1
        is_last = not self._looks()
        passes = PassesOnTheWay(
            tuple(self._noted),
            tuple((self._modes or {}).items()),
            self._scale,
            self._checkpoints.seen,
            is_last,
            self._history,
        )
        if self._steps == _FIRST:
            self._checkpoints.stop()
        self._noted = []
        self._modes = None
        self._scale = None
        if is_last:
            self._left = None
        return passes

    def _looks(self) -> bool:
        return self._steps < _FIRST or self._steps % _AGAIN < 2

    # What torch tells.

    def before_backward(self, begun: BackwardPass) -> None:
        """A pass begins, of this model or of another."""
        if not self._looks() or len(self._noted) >= _MOST:
            return
        tensors = begun.tensors
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        if len(roots) != 1 or not isinstance(roots[0], Tensor):
            return
        form = form_of(roots[0])
        lines, places = _called_from()
        begun.notes[self] = NotedPass(
            lines,
            places,
            form,
            None if form.there is None else HostCopy.of(form.there.reshape(1)),
            None if form.weight is None else HostCopy.of(form.weight.reshape(1)),
            keeps_graph=begun.keeps_graph,
            origin=working_line(),
        )

    def gradients_before(self, begun: BackwardPass) -> None:
        """There are gradients, which can be read before it writes; nobody tells where none are."""
        if self._left is not None and self._looks():
            begun.notes[_GONE] = self._left.is_gone()

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """It has returned, and was of this model."""
        begin: NotedPass | None = begun.notes.pop(self, None)
        if begin is None or not self._looks():
            return
        self._threads.add(begun.thread)
        if len(self._threads) > 1:  # whose gradients these are is known to nobody
            self._noted.clear()
            self._left = None
            return
        self._note_gap(begun.notes.pop(_GONE, True))
        seen: SeenPass | None = begun.notes.get(NOTE)
        calls = None if seen is None else tuple(each.place for each in seen.calls)
        self._noted.append(replace(begin, rows=tuple(rows), calls=calls))
        learning = {id(self._parameters[row]) for row in rows}
        parts = evaluating_parts(self._model, learning)
        known = self._modes
        self._modes = parts if known is None else {k: v for k, v in parts.items() if k in known}
        self._is_used = self._inside_step
        self._left = _Left.of([self._parameters[row] for row in rows], begin.caller)

    def _note_gap(self, is_gone: bool | HostCopy) -> None:
        left = self._left
        self._left = None
        if left is None or is_gone is False:
            return
        is_used = self._is_used or self._inside_step or left.are_kept_elsewhere()
        has_moved = True if is_used else left.has_moved()
        self._noted.append(NotedGap(left.caller, left.was_zero, is_gone, is_used, has_moved))

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """The next losses carry the scaler's factor."""
        if self._looks():
            self._scale = loss_scale(scaler)

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """The gradients were used, even where the step is left out."""
        self._is_used = True

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        left = self._left
        if left is not None and not self._is_used and self._looks():
            self._missed = left.are_missed_by(optimizer)
        self._inside_step = True
        self._is_used = True

    def _step_ends(self, *_: Any) -> None:
        self._note_missed()
        self._inside_step = False
        self._is_used = True

    def _note_missed(self) -> None:
        left = self._left
        missed = self._missed
        self._missed = False
        if left is None or missed is False:
            return
        # Where there is none, its weight tells whether the optimizer had it from elsewhere.
        has_moved = left.has_moved() if missed is True else False
        gap = NotedGap(left.caller, left.was_zero, missed, False, has_moved, is_missed=True)
        self._noted.append(gap)


class _Left:
    """What a pass has left: the smallest gradient, and its weight then; where the others are."""

    def __init__(self, parameters: Sequence[Tensor], caller: Caller) -> None:
        parameter = min(parameters, key=Tensor.numel)
        assert parameter.grad is not None
        self.caller = caller
        self._written = [weakref.ref(each) for each in parameters]
        self._parameter = weakref.ref(parameter)
        self._weight = parameter.detach().clone()
        self.was_zero = _is_zero(parameter.grad)

    @classmethod
    def of(cls, parameters: Sequence[Tensor], caller: Caller) -> "_Left | None":
        """Of some parameters; None where none will do."""
        dense = [
            each
            for each in parameters
            if each.grad is not None
            and each.numel()
            and not is_sharded(each.grad)
            and each.grad.layout is torch.strided
        ]
        return cls(dense, caller) if dense else None

    def is_gone(self) -> bool | HostCopy:
        """Whether it is not there any more, or all zero."""
        parameter = self._parameter()
        if parameter is None:
            return False
        return True if parameter.grad is None else _is_zero(parameter.grad)

    def are_missed_by(self, optimizer: Optimizer) -> bool | HostCopy:
        """Whether this optimizer is about to step, and finds none of the pass's gradients.

        Of them all: recipes freeze a layer by taking its gradient away.
        """
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        there = [each for ref in self._written if (each := ref()) is not None and id(each) in held]
        gradients = [each.grad for each in there if each.grad is not None]
        if not gradients:
            return bool(there)
        plain = [each for each in gradients if not is_sharded(each)]
        if len(gradients) < len(there) or len(plain) < len(gradients):
            return False
        if any(each.layout is not torch.strided for each in plain):
            return False
        ends = sorted(plain, key=Tensor.numel)
        # The smallest and the largest: all would be as many kernels as parameters.
        return _is_zero(ends[0], ends[-1])

    def are_kept_elsewhere(self) -> bool:
        """Return whether a parameter has another attribute that may hold these gradients.

        Opacus sums clipped per-sample gradients in such an attribute over several passes.
        """
        parameter = self._parameter()
        shape = () if parameter is None else parameter.shape
        return parameter is not None and any(
            isinstance(each, Tensor) and each.shape == shape for each in vars(parameter).values()
        )

    def has_moved(self) -> bool | HostCopy:
        """Whether its weight was changed, by an optimizer or by hand."""
        parameter = self._parameter()
        if parameter is None:
            return True
        # NaN moves too: it is never what it was.
        return HostCopy.of((parameter.detach() != self._weight).any().reshape(1))


def _is_zero(*gradients: Tensor) -> HostCopy:
    flags = [(each.detach() == 0).all().to(gradients[0].device) for each in gradients]
    return HostCopy.of(torch.stack(flags).all().reshape(1))


def _is_inside_step() -> bool:
    """Return whether this code runs inside an optimizer's step, in a hook or a closure."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # torch wraps `step`, and calls hooks before it.
        may_be_step = frame.f_code.co_name in ("step", "wrapper")
        if may_be_step and isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False


def _called_from() -> tuple[Lines, tuple[int, ...]]:
    """The user's lines of this call, and the places within them: one line may hold two calls."""
    frames = list(islice(users_frames(), _FRAMES))
    lines = tuple(f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames)
    return lines, tuple(frame.f_lasti for frame in frames)
