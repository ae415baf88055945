"""Loops whose optimizer is not watched: the user says when the gradient is true."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.guard import Guard
from gradsight.core.passes import BackwardPass, GradientState, gradient_state, is_same
from gradsight.session.line import StepLine
from gradsight.session.seen_gradients import ScaledHere
from gradsight.values.steps import (
    EDITED_GRADIENT,
    LOCAL_GRADIENT,
    NO_GRADIENT,
    TRUE_GRADIENT,
)


class ManualSteps:
    """`step()` is called after backward and before clipping."""

    def __init__(self, parameters: Sequence[Tensor], line: StepLine, guard: Guard) -> None:
        self._parameters = list(parameters)
        self._line = line
        self._guard = guard
        self._here = ScaledHere()
        self._local = False
        self._left: list[GradientState | None] | None = None
        """The gradients as the last backward pass, or unscaling, has left them."""
        self._is_edited = False

    def start(self) -> None:
        """Begin to watch the loss scale."""
        moments.listen(self, self._guard, self._parameters)

    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass begins, of this model or of another."""
        self._here.pass_begins(begun)

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """A backward pass has returned."""
        self._local = not self._line.reduction.holds()
        self._left = self._states()
        self._is_edited = False

    def edit_begins(self) -> None:
        """Torch is about to clip or to unscale gradients."""
        self._is_edited = self._was_edited()

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """The gradients of the next backward passes carry this scaler's factor."""
        self._here.scaler = scaler

    def gradients_unscaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """The gradients are without the factor again."""
        self._here.scaler = None
        self._left = self._states()

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """The scaler is about to take its factor out."""
        self._here.scaler = None

    def _states(self) -> list[GradientState | None]:
        return [gradient_state(tensor.grad) for tensor in self._parameters]

    def _was_edited(self) -> bool:
        """Whether gradients are not what backward left, so that they may be clipped already."""
        if self._is_edited or self._left is None:
            return self._is_edited
        pairs = zip(self._parameters, self._left, strict=True)
        return any(not is_same(tensor.grad, left) for tensor, left in pairs)

    def step(self) -> None:
        """The gradient is true now, and this is the step."""
        self._guard.run(self._step)

    def _step(self) -> None:
        rows = [row for row, tensor in enumerate(self._parameters) if tensor.grad is not None]
        gradient = LOCAL_GRADIENT if self._local else TRUE_GRADIENT
        if self._was_edited():
            gradient = EDITED_GRADIENT
        scaler = self._here.scaler
        if rows:
            self._line.gradients_ready(rows, scaler, together=not self._local)
            self._line.after_update(rows, None, scaler is not None, skipped=False)
        else:
            gradient = NO_GRADIENT
        self._line.end_step(gradient)
        self._here.scaler = None
        self._local = False
        self._left = None
        self._is_edited = False
