"""Notices parameters that a model gets in the middle of a run: a new head, adapters."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from gradsight.core import moments
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_hook
from gradsight.core.parameters import Named, named_parameters
from gradsight.core.passes import BackwardPass


class ParameterChanges:
    """Compares the parameters of a model with those that are watched, before a backward pass.

    Only where some module of the process was given a parameter or a child since.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[Tensor],
        guard: Guard,
        changed: Callable[[list[Named]], None],
    ) -> None:
        """`changed` gets the parameters as they are now."""
        self._model = model
        self._tensors = list(tensors)
        self._guard = guard
        self._changed = changed
        self._is_doubtful = False

    def start(self) -> None:
        """Begin to watch."""
        moments.listen(self, self._guard)
        put_hook(self._guard, register_module_module_registration_hook, self._registered)
        put_hook(self._guard, register_module_parameter_registration_hook, self._registered)

    def watch_instead(self, tensors: Sequence[Tensor]) -> None:
        """These are the parameters that are watched from now on."""
        self._tensors = list(tensors)

    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass begins."""
        if not self._is_doubtful:
            return
        self._is_doubtful = False
        parameters = named_parameters(self._model)
        known = {id(tensor) for tensor in self._tensors}
        now = {id(named.tensor) for named in parameters}
        is_trainable = any(named.tensor.requires_grad for named in parameters)
        if now - known and is_trainable:
            self._changed(parameters)

    def _registered(self, *_: Any) -> None:
        self._is_doubtful = True
