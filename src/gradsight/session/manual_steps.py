"""Loops whose optimizer is not watched: the user says when the gradient is true."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.guard import Guard
from gradsight.core.passes import BackwardPass
from gradsight.core.sharing import reduces_gradients
from gradsight.session.line import StepLine
from gradsight.session.seen_gradients import ScaledHere
from gradsight.values.steps import LOCAL_GRADIENT, NO_GRADIENT, TRUE_GRADIENT


class ManualSteps:
    """`step()` is called after backward and before clipping."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[Tensor], line: StepLine, guard: Guard
    ) -> None:
        self._model = model
        self._parameters = list(parameters)
        self._line = line
        self._guard = guard
        self._here = ScaledHere()
        self._local = False

    def start(self) -> None:
        """Begin to watch the loss scale."""
        moments.listen(self, self._guard, self._parameters)

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """A backward pass has returned."""
        self._local = not reduces_gradients(self._model)

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """The gradients of the next backward passes carry this scaler's factor."""
        self._here.scaler = scaler

    def gradients_unscaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """The gradients are without the factor again."""
        self._here.scaler = None

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """The scaler is about to take its factor out."""
        self._here.scaler = None

    def step(self) -> None:
        """The gradient is true now, and this is the step."""
        self._guard.run(self._step)

    def _step(self) -> None:
        rows = [row for row, tensor in enumerate(self._parameters) if tensor.grad is not None]
        gradient = LOCAL_GRADIENT if self._local else TRUE_GRADIENT
        scaler = self._here.scaler
        if rows:
            self._line.gradients_ready(rows, scaler, together=not self._local)
            self._line.after_update(rows, None, scaler is not None, skipped=False)
        else:
            gradient = NO_GRADIENT
        self._line.end_step(gradient)
        self._here.scaler = None
        self._local = False
