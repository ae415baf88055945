"""Hooks of ours on modules: in a copy of the model they do nothing."""

from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleHook:
    """A hook of ours. A copy of the module, or one saved and loaded, has one that does nothing.

    What torch hands to a hook after the module is handed on to `action`.
    """

    # Copies keep the hooks of the original: without this, training a deep copy (a moving average,
    # a teacher) would be taken for the watched model's, and pickling would take our state along.

    def __init__(self, action: Callable[..., None] | None = None) -> None:
        self._action = action

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if self._action is not None:
            self._action(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleHook":
        return type(self)()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()
