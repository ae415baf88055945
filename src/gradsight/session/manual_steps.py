"""Loops whose optimizer is not watched: the user says when the gradient is true."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import moments as interception
from gradsight.core.sharing import reduces_gradients
from gradsight.session.optimizer_steps import LOCAL, NONE, TRUE, Listener


class ManualCapture:
    """For loops without a watched optimizer: `step()` is called after backward and before clipping."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], listener: Listener) -> None:
        self._model = model
        self._listener = listener
        self._scaler: torch.amp.GradScaler | None = None
        self._local = False
        self.set_parameters(parameters)

    def set_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Which parameters the rows stand for."""
        self._parameters = list(parameters)

    def start(self) -> None:
        """Begin to watch the loss scale."""
        interception.observe(self)

    def stop(self) -> None:
        """Leave everything as it was found."""
        interception.forget(self)

    def after_backward(self) -> None:
        self._local = not reduces_gradients(self._model)

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def unscaled(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        self._scaler = None

    def scaler_steps(self, optimizer: Optimizer) -> None:
        self._scaler = None

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        pass

    def step(self) -> None:
        """The gradient is true now, and this is the step."""
        rows = [row for row, parameter in enumerate(self._parameters) if parameter.grad is not None]
        if rows:
            self._listener.look(rows, self._scaler)
            self._listener.after_update(rows, None, self._scaler is not None, skipped=False)
        self._listener.end_step(NONE if not rows else LOCAL if self._local else TRUE)
        self._scaler, self._local = None, False
