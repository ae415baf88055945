"""When the gradient is true and when a step ends, whatever the training loop looks like.

A *round* is one step of the run: every watched optimizer steps in it at most once. Its gradients
are looked at

- when a backward pass has returned: accumulated so far, reduced, not yet clipped; the last look before a step counts;
- inside a closure handed to the optimizer: after its first evaluation, which is where the step starts from;
- inside a backward pass whose hooks step the optimizer: just before each of those steps;
- when the optimizer steps, for what appeared without a backward pass: then the record says so.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import moments as interception
from gradsight.core.sharing import reduces_gradients
from gradsight.errors import UsageError

TRUE, LATE, LOCAL, NONE = "true", "at the optimizer", "not reduced over ranks", "none seen"
"""What a step's numbers are measured on. LATE: seen only when the optimizer stepped, so possibly
clipped already.
"""


class Listener(Protocol):
    """The one who measures and records. `rows` are positions in the list of parameters."""

    def look(self, rows: Sequence[int], scaler: torch.amp.GradScaler | None) -> None:
        """The gradients of these parameters are true now. The scaler's factor is in them if there
        is one.
        """

    def before_update(self, rows: Sequence[int], scaler: torch.amp.GradScaler | None) -> None:
        """The optimizer of these parameters is about to use their gradients, still scaled if a
        scaler is given.
        """

    def after_update(
        self, rows: Sequence[int], optimizer: Optimizer | None, scaled: bool, skipped: bool | Tensor
    ) -> None:
        """It has stepped, or was skipped. `rows` were looked at; `scaled`: a scaler's factor was in
        them then.
        """

    def end_step(self, gradient: str) -> None:
        """The round is complete."""

    def failed(self, error: Exception) -> None:
        """Something of ours went wrong; nothing more will be seen."""


class OptimizerCapture:
    """Watches the optimizers of a model and tells a listener about looks, updates and steps."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizers: Iterable[Optimizer],
        listener: Listener,
    ) -> None:
        self._model = model
        self._listener = listener
        self._optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        self._handles: list[Any] = []
        self._seen: set[int] = set()  # rows looked at since their optimizer last stepped
        self._local = False
        self._stepped_in_backward = False
        self._closure_evaluated = False
        self._scaled_loss_by: torch.amp.GradScaler | None = None  # since an optimizer last stepped
        self._scaler: torch.amp.GradScaler | None = (
            None  # whose factor was in the gradients at the last look
        )
        self._unscaled: set[int] = set()
        self._by_scaler: set[int] = set()
        self._called_by_scaler = False
        self.set_parameters(parameters)
        self._begin_round()

    def set_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Which parameters the rows stand for."""
        self._parameters = list(parameters)
        self._rows: dict[int, tuple[int, list[int]]] = {}
        self._seen.clear()

    def start(self) -> None:
        """Begin to watch."""
        interception.observe(self)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._pre_hook))
            self._handles.append(optimizer.register_step_post_hook(self._post_hook))

    def stop(self) -> None:
        """Leave everything as it was found."""
        interception.forget(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # What torch tells. Nothing of ours may reach the training loop.

    def after_backward(self) -> None:
        self._guarded(self._after_backward)

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        self._scaled_loss_by = scaler

    def unscaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        self._unscaled.add(id(unwrapped(optimizer)))

    def scaler_steps(self, optimizer: Optimizer) -> None:
        self._by_scaler.add(id(unwrapped(optimizer)))
        self._called_by_scaler = False

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        inner = unwrapped(optimizer)
        if not self._called_by_scaler and any(inner is known for known in self._optimizers):
            self._guarded(self._stepped, inner, True)

    def _pre_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """`args` begins with the optimizer itself; a closure is the next argument or a keyword."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._guarded(self._ready, optimizer)
            return None
        told = self._ready_after(closure, optimizer)
        return (
            (args, {**kwargs, "closure": told})
            if "closure" in kwargs
            else ((args[0], told, *args[2:]), kwargs)
        )

    def _post_hook(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._called_by_scaler = True
        self._guarded(self._stepped, optimizer, getattr(optimizer, "found_inf", None))

    def _guarded(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:
            self._listener.failed(error)

    # What it means.

    def _begin_round(self) -> None:
        self._done: set[int] = set()
        self._any_seen = self._any_late = self._any_local = False

    def _after_backward(self) -> None:
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            if self._done:
                self._end_round()
        elif not self._closure_evaluated:
            self._local = not reduces_gradients(self._model)
            self._look(
                [
                    row
                    for row, parameter in enumerate(self._parameters)
                    if parameter.grad is not None
                ]
            )

    def _look(self, rows: list[int]) -> None:
        if rows:
            self._seen.update(rows)
            self._scaler = self._scaled_loss_by
            self._listener.look(rows, self._scaler)

    def _ready_after(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """The same closure, which also tells when its first evaluation is done: the step starts
        from that gradient.
        """

        @functools.wraps(closure)
        def told() -> Any:
            result = closure()
            if not self._closure_evaluated:
                self._closure_evaluated = True
                self._guarded(self._ready, optimizer)
            return result

        return told

    def _ready(self, optimizer: Optimizer) -> None:
        """The optimizer has its gradients and has not used them yet."""
        if id(optimizer) in self._done:
            self._end_round()
        rows = self._rows_of(optimizer)
        if interception.inside_backward():
            self._look([row for row in rows if self._parameters[row].grad is not None])
        else:
            late = [
                row
                for row in rows
                if row not in self._seen and self._parameters[row].grad is not None
            ]
            self._any_late |= bool(late)
            self._look(late)
        still_scaled = id(optimizer) in self._by_scaler and id(optimizer) not in self._unscaled
        self._listener.before_update(rows, self._scaler if still_scaled else None)

    def _stepped(self, optimizer: Optimizer, skipped: bool | Tensor | None) -> None:
        rows, key = self._rows_of(optimizer), id(optimizer)
        seen = [row for row in rows if row in self._seen]
        scaled = key in self._by_scaler or key in self._unscaled
        self._listener.after_update(seen, optimizer, scaled, False if skipped is None else skipped)
        self._any_seen |= bool(seen)
        self._any_local |= self._local
        self._seen.difference_update(rows)
        self._by_scaler.discard(key)
        self._unscaled.discard(key)
        self._scaled_loss_by = None
        self._closure_evaluated = False
        self._stepped_in_backward = interception.inside_backward()
        self._done.add(key)
        if len(self._done) == len(self._optimizers):
            self._end_round()

    def _end_round(self) -> None:
        gradient = (
            NONE
            if not self._any_seen
            else LATE
            if self._any_late
            else LOCAL
            if self._any_local
            else TRUE
        )
        self._begin_round()
        self._listener.end_step(gradient)

    def _rows_of(self, optimizer: Optimizer) -> list[int]:
        """The rows this optimizer updates; the first one also answers for parameters that no
        optimizer was given.
        """
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._rows.get(id(optimizer))
        if known is None or known[0] != size:
            given = self._given_to(optimizer)
            if optimizer is self._optimizers[0]:
                elsewhere = set().union(*(self._given_to(other) for other in self._optimizers[1:]))
                given = {id(parameter) for parameter in self._parameters} - (elsewhere - given)
            rows = [row for row, parameter in enumerate(self._parameters) if id(parameter) in given]
            known = self._rows[id(optimizer)] = (size, rows)
        return known[1]

    def _given_to(self, optimizer: Optimizer) -> set[int]:
        return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_optimizers(optimizer: Any) -> list[Optimizer]:
    """One optimizer or several as a list; anything else is an error that says what came."""
    if optimizer is None:
        return []
    found = (
        [optimizer]
        if isinstance(optimizer, Optimizer) or hasattr(optimizer, "param_groups")
        else optimizer
    )
    if isinstance(found, (str, dict)) or not isinstance(found, Iterable):
        raise UsageError(
            f"optimizer must be a torch optimizer or a sequence of them, got {type(optimizer).__name__}"
        )
    found = list(found)
    for each in found:
        if not isinstance(unwrapped(each), Optimizer):
            raise UsageError(
                f"optimizer must be a torch optimizer or a sequence of them, got one {type(each).__name__}"
            )
    return found


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself where a library (Accelerate, Lightning) hands out a wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer
