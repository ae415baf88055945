"""When the gradient is true and when a step ends, whatever the training loop looks like.

A *round* is one step of the run: every watched optimizer steps in it at most once. Its gradients
are looked at

- when a backward pass has returned: accumulated so far, reduced, not yet clipped; the last look
  before a step counts;
- inside a closure handed to the optimizer: after its first evaluation, which is where the step
  starts from;
- inside a backward pass whose hooks step the optimizer: just before each of those steps;
- when the optimizer steps, for what appeared without a backward pass: then the record says so.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.optimizers import innermost_optimizer
from gradsight.core.sharing import reduces_gradients
from gradsight.session.line import StepLine
from gradsight.values.steps import LATE_GRADIENT, LOCAL_GRADIENT, NO_GRADIENT, TRUE_GRADIENT


class OptimizerSteps:
    """Watches the optimizers of a model, and tells the line of looks, updates and steps.

    `rows` are positions in the list of parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizers: Iterable[Optimizer],
        line: StepLine,
    ) -> None:
        self._model = model
        self._parameters = list(parameters)
        self._optimizers = [innermost_optimizer(optimizer) for optimizer in optimizers]
        self._line = line
        self._handles: list[Any] = []
        self._failed = False
        self._rows: dict[int, tuple[int, list[int]]] = {}
        self._seen: set[int] = set()  # rows looked at since their optimizer last stepped
        self._local = False
        self._stepped_in_backward = False
        self._closure_evaluated = False
        # The scaler that multiplied a loss since an optimizer last stepped.
        self._scaled_loss_by: torch.amp.GradScaler | None = None
        # The scaler whose factor was in the gradients at the last look.
        self._scaler: torch.amp.GradScaler | None = None
        self._unscaled: set[int] = set()
        self._by_scaler: set[int] = set()
        self._called_by_scaler = False
        self._begin_round()

    def start(self) -> None:
        """Begin to watch."""
        # Hooks of the optimizer alone would not do: they see clipped gradients, scaled ones where
        # it is fused, none yet where a closure makes them, and no step that a scaler skips.
        moments.listen(self)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._pre_hook))
            self._handles.append(optimizer.register_step_post_hook(self._post_hook))

    def stop(self) -> None:
        """Leave everything as it was found."""
        moments.leave(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # What torch tells. Nothing of ours may reach the training loop.

    def gradients_ready(self) -> None:
        """A backward pass has returned."""
        self._guarded(self._after_backward)

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """The gradients of the next backward passes carry this scaler's factor."""
        self._scaled_loss_by = scaler

    def gradients_unscaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """This optimizer's gradients are without the factor again."""
        self._unscaled.add(id(innermost_optimizer(optimizer)))

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """A scaler is about to step this optimizer, or to leave it out."""
        self._by_scaler.add(id(innermost_optimizer(optimizer)))
        self._called_by_scaler = False

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        """It has done one or the other."""
        inner = innermost_optimizer(optimizer)
        if not self._called_by_scaler and any(inner is known for known in self._optimizers):
            self._guarded(self._stepped, inner, True)

    def _pre_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """`args` begins with the optimizer itself; a closure is the next one or a keyword."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._guarded(self._ready, optimizer)
            return None
        watched = self._ready_after(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _post_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # Not in a pre-hook: under Lightning that one runs before backward.
        self._called_by_scaler = True
        self._guarded(self._stepped, optimizer, getattr(optimizer, "found_inf", None))

    def _guarded(self, action: Callable[..., None], *args: Any) -> None:
        """After a fault nothing more is seen. Hooks stay: torch may be walking through them now."""
        if self._failed:
            return
        try:
            action(*args)
        except Exception as error:
            self._failed = True
            moments.leave(self)
            self._line.failed(error)

    # What it means.

    def _begin_round(self) -> None:
        self._done: set[int] = set()
        self._any_seen = False
        self._any_late = False
        self._any_local = False

    def _after_backward(self) -> None:
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            if self._done:
                self._end_round()
        # LBFGS evaluates its closure many times a step; the step starts from the first gradient.
        elif not self._closure_evaluated:
            self._local = not reduces_gradients(self._model)
            rows = self._with_gradient(range(len(self._parameters)))
            self._look(rows, together=not self._local)

    def _with_gradient(self, rows: Iterable[int]) -> list[int]:
        return [row for row in rows if self._parameters[row].grad is not None]

    def _look(self, rows: list[int], together: bool) -> None:
        """`together`: a backward pass has reduced the gradients, so that all ranks are here now."""
        if rows:
            self._seen.update(rows)
            self._scaler = self._scaled_loss_by
            self._line.gradients_ready(rows, self._scaler, together)

    def _ready_after(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """The same closure, which also tells when its first evaluation is done."""

        @functools.wraps(closure)
        def watched() -> Any:
            result = closure()
            if not self._closure_evaluated:
                self._closure_evaluated = True
                self._guarded(self._ready, optimizer)
            return result

        return watched

    def _ready(self, optimizer: Optimizer) -> None:
        """The optimizer has its gradients and has not used them yet."""
        # It steps a second time before the others have: it has a rhythm of its own.
        if id(optimizer) in self._done:
            self._end_round()
        rows = self._rows_of(optimizer)
        # Optimizers that step inside backward free each gradient at once: this is the only chance.
        if moments.inside_backward():
            self._look(self._with_gradient(rows), together=False)
        else:
            late = self._with_gradient(row for row in rows if row not in self._seen)
            self._any_late |= bool(late)
            self._look(late, together=False)
        key = id(optimizer)
        still_scaled = key in self._by_scaler and key not in self._unscaled
        self._line.before_update(rows, self._scaler if still_scaled else None)

    def _stepped(self, optimizer: Optimizer, skipped: bool | Tensor | None) -> None:
        rows = self._rows_of(optimizer)
        key = id(optimizer)
        seen = [row for row in rows if row in self._seen]
        scaled = key in self._by_scaler or key in self._unscaled
        self._line.after_update(seen, optimizer, scaled, False if skipped is None else skipped)
        self._any_seen |= bool(seen)
        self._any_local |= self._local
        self._seen.difference_update(rows)
        self._by_scaler.discard(key)
        self._unscaled.discard(key)
        self._scaled_loss_by = None
        self._closure_evaluated = False
        self._stepped_in_backward = moments.inside_backward()
        self._done.add(key)
        if len(self._done) == len(self._optimizers):
            self._end_round()

    def _end_round(self) -> None:
        gradient = TRUE_GRADIENT
        if not self._any_seen:
            gradient = NO_GRADIENT
        elif self._any_late:
            gradient = LATE_GRADIENT
        elif self._any_local:
            gradient = LOCAL_GRADIENT
        self._begin_round()
        self._line.end_step(gradient)

    def _rows_of(self, optimizer: Optimizer) -> list[int]:
        """The rows this optimizer updates.

        The first one also answers for parameters that no optimizer was given.
        """
        # Groups may be added in the middle of a run; counting them is cheaper than comparing.
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._rows.get(id(optimizer))
        if known is None or known[0] != size:
            given = _given_to(optimizer)
            if optimizer is self._optimizers[0]:
                elsewhere = set().union(*(_given_to(other) for other in self._optimizers[1:]))
                given = {id(parameter) for parameter in self._parameters} - (elsewhere - given)
            parameters = enumerate(self._parameters)
            rows = [row for row, parameter in parameters if id(parameter) in given]
            known = (size, rows)
            self._rows[id(optimizer)] = known
        return known[1]


def _given_to(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
