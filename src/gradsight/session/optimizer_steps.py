"""When the gradient is true and when a step ends, whatever the training loop looks like.

A *round* is one step of the run: every watched optimizer steps in it at most once. Its gradients
are looked at

- when a backward pass that wrote some of them has returned: accumulated so far, reduced, not yet
  clipped; the last look before a step counts. What other passes have left alone since it was
  looked at keeps its reading, clipped or not;
- inside a closure handed to the optimizer: after its first evaluation, which is where the step
  starts from;
- inside a backward pass whose hooks step the optimizer: just before each of those steps;
- when the optimizer steps, for what appeared without a backward pass: then the record says so;
- before torch clips, and when the optimizer steps, if somebody has edited gradients since backward
  (divided by tokens, replaced, reduced by hand): then the record says so too.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.devices import is_accelerator
from gradsight.core.guard import Guard
from gradsight.core.hooks import has_other_hooks, put_hook
from gradsight.core.optimizers import (
    calls_of_step,
    innermost_optimizer,
    parameters_of,
    wrapping,
)
from gradsight.core.passes import (
    BackwardPass,
    FollowedParameters,
    tell_of_this_pass,
    this_thread,
)
from gradsight.measure.clipping import ClipReading
from gradsight.measure.host_copy import HostCopy
from gradsight.session.line import StepLine
from gradsight.session.seen_gradients import ScaledHere, SeenGradients
from gradsight.session.skipping import UpdateSkipper
from gradsight.values.steps import (
    CHANGED_GRADIENT,
    EDITED_GRADIENT,
    HOOKED_GRADIENT,
    LATE_GRADIENT,
    LOCAL_GRADIENT,
    NO_GRADIENT,
    REPAIRED_GRADIENT,
    SHARED_GRADIENT,
    TRUE_GRADIENT,
    UNWATCHED_GRADIENT,
)


class OptimizerSteps:
    """Watches the optimizers of a model, and tells the line of looks, updates and steps.

    `rows` are positions in the list of parameters.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizers: Iterable[Optimizer],
        line: StepLine,
        guard: Guard,
        skipper: UpdateSkipper | None = None,
    ) -> None:
        """`skipper`: leaves out updates that would do harm."""
        self._skipper = skipper
        self._parameters = list(parameters)
        self._optimizers: list[Optimizer] = []
        self._wrappers: list[Any] = []
        """Optimizers around those that update the weights, as SAM and Lookahead are."""
        for optimizer in optimizers:
            *around, inner = wrapping(optimizer)
            self._optimizers.append(inner)
            self._wrappers += [each for each in around if isinstance(each, Optimizer)]
        self._line = line
        self._guard = guard
        self._followed: FollowedParameters | None = None
        self._rows: dict[int, tuple[int, list[int]]] = {}
        self._seen = SeenGradients(self._parameters)  # since their optimizer last stepped
        self._shared = False
        self._local = False
        self._hooked = False
        self.lacks_parameters = False
        """Whether the model has parameters by now that are not in the record."""
        self._stepped_in_backward = False
        self._closure_evaluated = False
        self._here = ScaledHere()  # since an optimizer last stepped
        # The scaler whose factor was in the gradients at the last look.
        self._scaler: torch.amp.GradScaler | None = None
        self._unscaled: set[int] = set()
        self._by_scaler: set[int] = set()
        self._called_by_scaler = False
        self._replaced: set[int] = set()
        """Optimizers in whose place others were made; a step need not wait for them."""
        self._opened_in: Optimizer | None = None
        """The optimizer inside of whose `step` the watch was opened, in its closure.

        The end of that closure is not seen.
        """
        self._outermost: Optimizer | None = None
        """The wrapper whose `step` is running."""
        self._stepped_inside: set[int] = set()
        """Which optimizers it has stepped: another time is of the same step."""
        self._edits = 0
        self._thread = -1
        self._scaled_limit: float | None = None
        """The limit of a clipping that came while a scaler's factor was in the gradients."""
        self._begin_round()

    def start(self) -> None:
        """Begin to watch."""
        stepping = (each for each in self._optimizers if calls_of_step(each))
        self._opened_in = next(stepping, None)
        # Hooks of the optimizer alone would not do: they see clipped gradients, scaled ones where
        # it is fused, none yet where a closure makes them, and no step that a scaler skips.
        self._followed = moments.listen(self, self._guard, self._parameters)
        for optimizer in self._optimizers:
            self._put_hooks(optimizer)
        for wrapper in self._wrappers:
            self._put_hooks_around(wrapper)

    def _put_hooks_around(self, wrapper: Optimizer) -> None:
        # A class of the user's may lack what `Optimizer.__init__` makes.
        if hasattr(wrapper, "_optimizer_step_pre_hooks"):
            put_hook(self._guard, wrapper.register_step_pre_hook, self._wrapper_begins)
            put_hook(self._guard, wrapper.register_step_post_hook, self._wrapper_ends)

    def _put_hooks(self, optimizer: Optimizer) -> None:
        put_hook(self._guard, optimizer.register_step_pre_hook, self._pre_hook)
        put_hook(self._guard, optimizer.register_step_post_hook, self._post_hook)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Watch one more. Optimizers with some of its parameters are no longer waited for.

        Those with no other parameters are let go: a script may make one in every epoch.
        """
        *around, inner = wrapping(optimizer)
        given = parameters_of(inner)
        stay = [each for each in self._optimizers if parameters_of(each) - given]
        stay_ids = {id(each) for each in stay}
        # The new one may have the id of one that is gone.
        self._replaced &= stay_ids
        self._replaced |= {id(each) for each in stay if parameters_of(each) & given}
        self._done &= stay_ids
        self._optimizers = [*stay, inner]
        self._rows.clear()
        self._put_hooks(inner)
        for wrapper in around:
            self._put_hooks_around(wrapper)

    def finish(self) -> None:
        """The run is over: a round in which some optimizer has not stepped is a step too."""
        with self._line.lock:
            if self._done:
                self._end_round()

    # What torch tells, through the guard. The optimizers of one model may be stepped by several
    # threads, so the line's lock is taken.

    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass begins, of this model or of another."""
        self._here.pass_begins(begun)

    def gradients_before(self, begun: BackwardPass) -> None:
        """A backward pass begins, which may write these gradients or not; of whatever thread."""
        # LBFGS evaluates its closure many times a step; the step starts from the first gradient.
        # Each evaluation clears the gradients first, so a pass that adds to them is of the same.
        seen = self._seen
        if self._opened_in is not None and seen.rows and not seen.edited(seen.rows):
            self._closure_evaluated = False
        if not self._closure_evaluated:
            self._seen.pass_begins(begun)

    def gradients_ready(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """A backward pass has returned, and has written these rows."""
        self._thread = this_thread()
        with self._line.lock:
            self._after_backward(begun, rows)

    def gradients_missed(self) -> None:
        """Whatever was seen may not be what the optimizer will use."""
        self._seen.clear()

    def gradients_shared(self) -> None:
        """Several threads write these gradients at once: they cannot even be read."""
        with self._line.lock:
            self._give_up()

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """The gradients of this thread's next backward passes carry this scaler's factor."""
        self._here.scaler = scaler

    def gradients_unscaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """This optimizer's gradients are without the factor again."""
        self._unscaled.add(id(innermost_optimizer(optimizer)))

    def edit_begins(self) -> None:
        """Torch is about to clip or to unscale gradients; by now they may have been edited."""
        if self._closure_evaluated or moments.inside_backward() or not self._is_mine():
            return
        with self._line.lock:
            self._settle_edits(list(self._seen.rows), self._here.scaler)
            self._seen.edit_begins()

    def edit_ended(self, edited: object, limit: object) -> None:
        """It has done so: to an optimizer's gradients, or to those of parameters.

        `limit`: of a clipping; None for an unscaling.
        """
        if self._is_mine():
            self._seen.edit_ended(edited)
            # A limit on the device was computed from the scale, most likely.
            if self._scaler is not None and isinstance(limit, int | float):
                self._note_limit(edited, limit)

    def _note_limit(self, clipped: object, limit: float) -> None:
        """Remember the limit of a clipping, if a scaler's factor was in all of these gradients."""
        tensors = clipped if isinstance(clipped, list | tuple) else [clipped]
        named = {id(tensor) for tensor in tensors}
        rows = {row for row in self._seen.rows if id(self._parameters[row]) in named}
        unscaled = {row for each in self._unscaled_optimizers() for row in self._rows_of(each)}
        # Somebody who has edited them may have divided them by the scale.
        if rows and not rows & (unscaled | self._seen.by_hand):
            self._scaled_limit = float(limit)

    def _is_mine(self) -> bool:
        """Whether this thread has written the gradients that were seen; others leave them alone."""
        return bool(self._seen.rows) and self._thread == this_thread()

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """A scaler is about to step this optimizer, or to leave it out."""
        inner = innermost_optimizer(optimizer)
        if self._is_watched(inner):
            self._by_scaler.add(id(inner))
            self._called_by_scaler = False

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        """It has done one or the other."""
        inner = innermost_optimizer(optimizer)
        if self._is_watched(inner) and not self._called_by_scaler:
            with self._line.lock:
                self._stepped(inner, True)

    def _is_watched(self, optimizer: Optimizer) -> bool:
        return any(optimizer is known for known in self._optimizers)

    def _pre_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """`args` begins with the optimizer itself; a closure is the next one or a keyword."""
        if calls_of_step(optimizer) > 1 or (self._outermost and self._is_counted(optimizer)):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            with self._line.lock:
                self._ready(optimizer)
            return None
        watched = self._ready_after(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _post_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if calls_of_step(optimizer) > 1 or (self._outermost and self._is_counted(optimizer)):
            return
        if self._outermost is not None:
            self._stepped_inside.add(id(optimizer))
        # Not in a pre-hook: under Lightning that one runs before backward.
        self._called_by_scaler = True
        with self._line.lock:
            self._stepped(optimizer, getattr(optimizer, "found_inf", None))

    def _is_counted(self, optimizer: Optimizer) -> bool:
        """Return whether the wrapper that is stepping has stepped this optimizer already."""
        if self._outermost is not None and not calls_of_step(self._outermost):
            # An exception has ended that step.
            self._outermost = None
            self._stepped_inside.clear()
        return id(optimizer) in self._stepped_inside

    def _wrapper_begins(self, wrapper: Optimizer, *_: Any) -> None:
        if self._outermost is None:
            self._outermost = wrapper

    def _wrapper_ends(self, wrapper: Optimizer, *_: Any) -> None:
        if self._outermost is wrapper and calls_of_step(wrapper) < 2:
            self._outermost = None
            self._stepped_inside.clear()

    # What it means.

    def _begin_round(self) -> None:
        self._done: set[int] = set()
        self._any_seen = False
        self._any_late = False
        self._any_local = False
        self._any_changed = False
        self._any_edited = False
        self._any_repaired = False
        self._any_hooked = False
        self._scaled_limit = None
        self._doubts: list[HostCopy] = []
        """Flags on their way: whether a gradient was edited between passes."""

    def _after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            if self._done:
                self._end_round()
        elif not self._closure_evaluated:
            self._local = not self._line.reduction.holds()
            self._hooked = any(has_other_hooks(self._parameters[row]) for row in rows)
            self._look(self._seen.pass_ended(begun, rows), together=not self._local)
            if self._opened_in is not None:
                self._closure_evaluated = True
                self._ready(self._opened_in)

    def _with_gradient(self, rows: Iterable[int]) -> list[int]:
        return [row for row in rows if self._parameters[row].grad is not None]

    def _look(self, rows: list[int], together: bool) -> None:
        """`together`: a backward pass has reduced the gradients, so that all ranks are here now."""
        if not rows:
            return
        self._seen.look(rows)
        scaler = self._here.scaler
        if scaler is not None and self._unscaled:
            # The factor is out of these; what is added to them now, no division can put right.
            without = {row for each in self._unscaled_optimizers() for row in self._rows_of(each)}
            plain = [row for row in rows if row in without]
            self._measure(plain, None, together)
            rows = [row for row in rows if row not in without]
        self._measure(rows, scaler, together)

    def _measure(
        self, rows: list[int], scaler: torch.amp.GradScaler | None, together: bool
    ) -> None:
        if rows:
            self._scaler = scaler
            complete = self._seen.are_all(rows) or not self._seen.are_clipped
            # An optimizer that never steps leaves the end of a round open until another steps
            # again: these gradients are then those of the next step.
            self._line.gradients_ready(rows, scaler, together, complete, or_next=bool(self._done))

    def _settle_edits(self, rows: Sequence[int], scaler: torch.amp.GradScaler | None) -> None:
        """Look again at gradients that somebody has edited since backward, if that changed them.

        `scaler`: its factor is in them still. What torch has clipped or unscaled is no edit.
        """
        edited = self._seen.edited_by_hand(rows)
        if edited:
            self._look_again(edited, scaler)

    def _look_again(self, edited: list[int], scaler: torch.amp.GradScaler | None) -> None:
        builder = self._line.builder
        if builder.is_broken(edited):
            # The optimizer got something else, but a NaN out of backward must not be hidden.
            self._seen.accept(edited)
            self._any_repaired = True
            return
        unscaled = {row for each in self._unscaled_optimizers() for row in self._rows_of(each)}
        if builder.is_unchanged(edited, unscaled.issuperset(edited)):
            self._seen.accept(edited)
            return
        left = self._with_gradient(edited)
        gone = [row for row in edited if self._parameters[row].grad is None]
        self._seen.forget(gone)
        builder.forget(gone)
        self._seen.look(left, by_hand=True)
        self._measure([row for row in left if row in unscaled], None, together=False)
        self._measure([row for row in left if row not in unscaled], scaler, together=False)
        self._any_edited |= bool(gone)

    def _unscaled_optimizers(self) -> list[Optimizer]:
        return [each for each in self._optimizers if id(each) in self._unscaled]

    def _ready_after(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """The same closure, which also tells when its first evaluation is done."""

        @functools.wraps(closure)
        def watched() -> Any:
            result = closure()
            self._guard.run(self._evaluated, optimizer)
            return result

        return watched

    def _evaluated(self, optimizer: Optimizer) -> None:
        if not self._closure_evaluated:
            self._closure_evaluated = True
            with self._line.lock:
                self._ready(optimizer)

    def _ready(self, optimizer: Optimizer) -> None:
        """The optimizer has its gradients and has not used them yet."""
        # It steps a second time before the others have: it has a rhythm of its own.
        if id(optimizer) in self._done:
            self._end_round()
        if self._followed is not None and moments.is_written_elsewhere(self._followed):
            self._give_up()
        if self._shared:
            return
        rows = self._rows_of(optimizer)
        # Optimizers that step inside backward free each gradient at once: this is the only chance.
        if moments.inside_backward():
            self._look(self._with_gradient(rows), together=False)
        key = id(optimizer)
        still_scaled = key in self._by_scaler and key not in self._unscaled
        scaler = self._scaler if still_scaled else None
        if not moments.inside_backward():
            self._settle_edits(rows, scaler)
            seen = self._seen.rows
            late = self._with_gradient(row for row in rows if row not in seen)
            self._any_late |= bool(late)
            self._look(late, together=False)
        alike = self._seen.are_clipped_alike(rows) and not self._hooked
        clip = self._line.before_update(rows, scaler, alike)
        if clip is not None and self._is_edited_unseen(clip, key):
            # The version of a gradient does not tell of what is done to its `.data`.
            self._look_again([row for row in rows if row in self._seen.rows], scaler)
            self._line.before_update(rows, scaler)
        self._edits = self._seen.calls
        # A scaler leaves such steps out by itself.
        if self._skipper is not None and key not in self._by_scaler:
            readings = self._line.builder.readings_of(rows)
            # Clipping, or the user, may have broken what backward left in order.
            edited = self._seen.edited(rows)
            if edited:
                readings.append(self._line.builder.again(edited))
            self._skipper.before_update(optimizer, readings, rows)

    def _is_edited_unseen(self, clip: ClipReading, key: int) -> bool:
        """Whether gradients are not what they were, though neither torch nor a version tells so."""
        if self._seen.are_clipped or moments.inside_backward() or clip.look.is_from_device:
            return False
        if key not in self._unscaled and not clip.still_scaled:
            clip = replace(clip, scale=None)  # no scaler has taken its factor out
        coefficient = clip.read()
        # What is not finite has no coefficient, edited or not.
        return coefficient != 1.0 and all(np.isfinite(peaks).all() for peaks in clip.look.peaks)

    def _is_edited_inside(self, rows: Sequence[int]) -> bool:
        """Whether the optimizer may have clipped or edited these gradients in its own step."""
        if self._closure_evaluated:
            return self._opened_in is not None  # what it did after its passes was not seen
        if moments.inside_backward():
            return False
        if self._seen.calls != self._edits:
            return True
        edited = self._with_gradient(self._seen.edited_by_hand(rows))
        gradients = [self._parameters[row].grad for row in edited]
        # It may also have cleared them, as it is done with them.
        return any(
            gradient is not None and (is_accelerator(gradient.device) or bool(gradient.any()))
            for gradient in gradients
        )

    def _stepped(self, optimizer: Optimizer, skipped: bool | Tensor | None) -> None:
        if self._skipper is not None and self._skipper.after_update(optimizer):
            skipped = True
        rows = self._rows_of(optimizer)
        key = id(optimizer)
        looked_at = self._seen.rows
        seen = [row for row in rows if row in looked_at]
        scaled = key in self._by_scaler or key in self._unscaled
        if self._scaled_limit is not None and key in self._by_scaler:
            self._line.builder.clipped_while_scaled(self._scaled_limit)
        self._line.after_update(
            seen,
            optimizer,
            scaled,
            False if skipped is None else skipped,
            edited_inside=bool(seen) and self._is_edited_inside(seen),
        )
        self._any_seen |= bool(seen)
        self._any_local |= self._local
        self._any_hooked |= self._hooked and bool(seen)
        self._any_edited |= not self._seen.by_hand.isdisjoint(seen)
        changed = self._seen.is_any_changed(seen)
        if isinstance(changed, HostCopy):
            self._doubts.append(changed)
        else:
            self._any_changed |= changed
        self._seen.forget(rows)
        self._by_scaler.discard(key)
        self._unscaled.discard(key)
        self._here.scaler = None
        self._closure_evaluated = False
        self._opened_in = None
        self._note_step_in_backward()
        self._done.add(key)
        awaited = (id(each) for each in self._optimizers)
        if all(each in self._done or each in self._replaced for each in awaited):
            self._end_round()

    def _note_step_in_backward(self) -> None:
        self._stepped_in_backward = moments.inside_backward()
        if self._stepped_in_backward and self._followed is not None:
            tell_of_this_pass(self._followed)

    def _give_up(self) -> None:
        """Look at nothing more: steps are counted, and the record says why there is no number."""
        self._seen.clear()
        if not self._shared:
            self._shared = True
            self._line.look_away_from_threads()

    def _end_round(self) -> None:
        gradient = TRUE_GRADIENT
        if self._shared:
            gradient = SHARED_GRADIENT
        elif not self._any_seen:
            gradient = NO_GRADIENT
        elif self._any_late:
            gradient = LATE_GRADIENT
        elif self._any_changed:
            gradient = CHANGED_GRADIENT
        elif self._any_repaired:
            gradient = REPAIRED_GRADIENT
        elif self._any_edited:
            gradient = EDITED_GRADIENT
        elif self.lacks_parameters:
            gradient = UNWATCHED_GRADIENT
        elif self._any_hooked:
            gradient = HOOKED_GRADIENT
        elif self._any_local:
            gradient = LOCAL_GRADIENT
        doubts: Sequence[HostCopy] = ()
        if gradient in (TRUE_GRADIENT, LOCAL_GRADIENT):
            doubts = self._doubts
        self._begin_round()
        self._line.end_step(gradient, doubts)

    def _rows_of(self, optimizer: Optimizer) -> list[int]:
        """The rows this optimizer updates.

        The first one also answers for parameters that no optimizer was given.
        """
        # Groups may be added in the middle of a run; counting them is cheaper than comparing.
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._rows.get(id(optimizer))
        if known is None or known[0] != size:
            given = parameters_of(optimizer)
            if optimizer is self._optimizers[0]:
                elsewhere = set().union(*(parameters_of(other) for other in self._optimizers[1:]))
                given = {id(parameter) for parameter in self._parameters} - (elsewhere - given)
            parameters = enumerate(self._parameters)
            rows = [row for row, parameter in parameters if id(parameter) in given]
            known = (size, rows)
            self._rows[id(optimizer)] = known
        return known[1]
