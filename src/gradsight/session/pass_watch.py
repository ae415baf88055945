"""What the backward passes of a step were like: from which line, of which loss, in which mode.

Looked at in the first steps, and again now and then: a model is most often left in evaluation mode
by its first validation.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsight.core import moments
from gradsight.core.devices import is_accelerator
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_hook
from gradsight.core.loss_graph import LossForm, form_of
from gradsight.core.passes import BackwardPass
from gradsight.core.source import users_frames
from gradsight.first_step.checkpoints import CutCheckpoints
from gradsight.first_step.modes import evaluating_parts
from gradsight.first_step.recorder import NOTE, SeenPass
from gradsight.values.first_step import RepeatedPass, StepPasses

_FIRST = 4
_AGAIN = 25
"""Steps that are looked at: the first, and two in every so many."""
_FRAMES = 4
_KEPT = "gradsight.kept"
"""Under this name a pass carries whether it found the gradient of the one before."""
_PASSES = 256


CallSite = tuple[tuple[str, int], ...]
"""Lines, and which instruction of each: two calls in one line are two."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One backward pass of the step under way."""

    lines: CallSite
    """The user's lines that it was called from, the innermost first."""
    form: LossForm
    rows: tuple[int, ...] = ()
    has_calls: bool = False
    """Whether the model was seen to be called for it: at the first step it is."""


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
        self._takes_as_is = any("SGD" in type(each).__name__ for each in optimizers)
        self._model = model
        self._parameters = parameters
        self._guard = guard
        self._steps = 0
        self._passes: list[_Pass] = []
        self._modes: dict[str, str] | None = None
        self._scale = 1.0
        self._left: _Left | None = None
        self._is_used = False
        self._inside_step = False
        self._thrown: dict[CallSite, int] = {}
        self._used: set[CallSite] = set()
        self._threads: set[int] = set()
        self._checkpoints = CutCheckpoints(guard)

    def start(self) -> None:
        """Begin to watch."""
        moments.listen(self, self._guard, self._parameters)
        put_hook(self._guard, register_optimizer_step_pre_hook, self._step_begins)
        put_hook(self._guard, register_optimizer_step_post_hook, self._step_ends)
        self._checkpoints.start()

    def stop(self) -> None:
        """Leave everything as it was found."""
        moments.leave(self)
        self._left = None

    def take(self) -> StepPasses | None:
        """What the step that has just ended was made of; None where nobody looked."""
        if not self._looks():
            self._steps += 1
            return None
        for each in self._passes:
            self._used.add(each.lines)
        thrown = [(count, lines) for lines, count in self._thrown.items() if lines in self._used]
        count, lines = max(thrown, default=(0, ()))
        passes = StepPasses(
            evaluating=tuple((self._modes or {}).items()),
            repeated=self._repeated(),
            summed=self._summed(),
            thrown_away=(count, _first(lines)) if count else None,
            cut_by_checkpoint=self._checkpoints.seen,
        )
        self._steps += 1
        if self._steps == _FIRST:
            self._checkpoints.stop()
        self._passes = []
        self._modes = None
        self._scale = 1.0
        if not self._looks():
            self._left = None
            self._thrown.clear()
        return passes

    def _looks(self) -> bool:
        return self._steps < _FIRST or self._steps % _AGAIN < 2

    def _repeated(self) -> RepeatedPass | None:
        """The line that ran backward most often, each time with a mean of a batch of its own."""
        groups: dict[CallSite, list[_Pass]] = {}
        for each in self._passes:
            groups.setdefault(each.lines, []).append(each)
        lines, passes = max(groups.items(), key=lambda pair: len(pair[1]), default=((), []))
        if len(passes) < 2 or not lines:
            return None
        first = passes[0]
        for each in passes:
            is_mean = each.form.reduction == "mean" and each.form.entries > 1
            is_same = each.form.factor == first.form.factor and each.rows == first.rows
            # Several terms of one output are no micro-batches.
            if not is_mean or not is_same or not each.has_calls:
                return None
        return RepeatedPass(len(passes), first.form.factor / self._scale, _first(lines))

    def _summed(self) -> int | None:
        forms = [each.form for each in self._passes]
        if not self._takes_as_is or not forms:
            return None
        if any(form.reduction != "sum" for form in forms):
            return None
        if any(abs(form.factor / self._scale - 1) > 1e-6 for form in forms):
            return None
        return min(form.entries for form in forms)

    # What torch tells.

    def before_backward(self, begun: BackwardPass) -> None:
        """A pass begins, of this model or of another."""
        if not self._looks() or len(self._passes) >= _PASSES:
            return
        tensors = begun.tensors
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        if len(roots) != 1 or not isinstance(roots[0], Tensor):
            return
        begun.notes[self] = _Pass(_lines(), form_of(roots[0]))

    def gradients_before(self, begun: BackwardPass) -> None:
        """There are gradients, which can be read before it writes; nobody tells where none are."""
        if self._left is not None and self._looks():
            begun.notes[_KEPT] = not self._left.is_gone()

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """It has returned, and was of this model."""
        begin: _Pass | None = begun.notes.pop(self, None)
        if begin is None or not self._looks():
            return
        self._threads.add(begun.thread)
        if len(self._threads) > 1:  # whose gradients these are is known to nobody
            self._passes.clear()
            self._left = None
            return
        self._notice_clearing(bool(begun.notes.pop(_KEPT, False)))
        seen: SeenPass | None = begun.notes.get(NOTE)
        has_calls = seen is not None and bool(seen.calls)
        self._passes.append(_Pass(begin.lines, begin.form, tuple(rows), has_calls))
        learning = {id(self._parameters[row]) for row in rows}
        parts = evaluating_parts(self._model, learning)
        known = self._modes
        self._modes = parts if known is None else {k: v for k, v in parts.items() if k in known}
        self._is_used = self._inside_step
        self._left = _Left.of([self._parameters[row] for row in rows], begin.lines)

    def _notice_clearing(self, were_kept: bool) -> None:
        left = self._left
        self._left = None
        if left is None or were_kept or left.was_zero:
            return
        # What was cleared is no part of the step under way.
        self._passes.clear()
        if not self._is_used and not self._inside_step and not left.has_moved():
            self._thrown[left.lines] = self._thrown.get(left.lines, 0) + 1

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """The next losses carry the scaler's factor."""
        if self._looks():
            self._scale = float(scaler.get_scale())

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """The gradients were used, even where the step is left out."""
        self._is_used = True

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        left = self._left
        if left is not None and not self._is_used and left.is_lost_to(optimizer):
            # Cleared between backward and the step, which now has nothing to go by.
            self._thrown[left.lines] = self._thrown.get(left.lines, 0) + 1
            self._left = None
        self._inside_step = True
        self._is_used = True

    def _step_ends(self, *_: Any) -> None:
        self._inside_step = False
        self._is_used = True


class _Left:
    """One gradient as a pass has left it, and its weight then: the smallest that is there."""

    def __init__(self, parameter: Tensor, lines: CallSite) -> None:
        assert parameter.grad is not None
        self.lines = lines
        self._parameter = weakref.ref(parameter)
        self._weight = parameter.detach().clone()
        self.was_zero = not bool(parameter.grad.any())

    @classmethod
    def of(cls, parameters: Sequence[Tensor], lines: CallSite) -> "_Left | None":
        """Of some parameters; None where none will do."""
        dense = [
            each
            for each in parameters
            if each.grad is not None
            and each.numel()
            and type(each.grad) is Tensor
            and each.grad.layout is torch.strided
        ]
        smallest = min(dense, key=lambda each: each.numel(), default=None)
        return None if smallest is None else cls(smallest, lines)

    def is_gone(self) -> bool:
        """Whether somebody has cleared it."""
        parameter = self._parameter()
        if parameter is None or self.was_zero:
            return False
        return parameter.grad is None or not bool(parameter.grad.any())

    def is_lost_to(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that holds the parameter finds its gradient cleared."""
        parameter = self._parameter()
        if parameter is None or self.was_zero:
            return False
        held = any(
            each is parameter for group in optimizer.param_groups for each in group["params"]
        )
        if not held or parameter.grad is None:
            return held
        # Zeros would have to be waited for elsewhere.
        return not is_accelerator(parameter.device) and not bool(parameter.grad.any())

    def has_moved(self) -> bool:
        """Whether its weight was changed, by an optimizer or by hand."""
        parameter = self._parameter()
        return parameter is None or not torch.equal(parameter.detach(), self._weight)


def _lines() -> CallSite:
    lines: list[tuple[str, int]] = []
    for frame in users_frames():
        lines.append((f"{frame.f_code.co_filename}:{frame.f_lineno}", frame.f_lasti))
        if len(lines) == _FRAMES:
            break
    return tuple(lines)


def _first(lines: CallSite) -> str | None:
    return lines[0][0] if lines else None
