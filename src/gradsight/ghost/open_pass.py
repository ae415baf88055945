"""The pass that is being observed, and how it ends where its engine is gone."""

import weakref
from collections.abc import Callable
from typing import Any

from gradsight.ghost.compiled_pass import CompiledObservation
from gradsight.ghost.observation import Observation


class OpenPass:
    """The pass that is being observed, for whoever has to end it."""

    def __init__(self) -> None:
        self.observation: Observation | CompiledObservation | None = None

    def stop(self) -> None:
        """Leave the model as it was found, if a pass is open."""
        if self.observation is not None:
            self.observation.stop()
            self.observation = None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does not keep its object alive; once that is gone, the call gives None."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
