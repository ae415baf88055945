"""Gradsight: what the gradients are doing, which samples push the model where, and what backward costs in memory.

The names below are the whole public surface. They are loaded when first used, so that importing the package imports neither
torch nor numpy.
"""

from importlib import import_module
from typing import Any

_FRONT_DOOR = {
    "GradsightError": "errors",
    "MetricsTracker": "record.tracker",
    "Schedule": "records",
    "check_gradient_health": "health",
    "log_gradient_distribution": "distribution",
    "open_run": "record.reader",
    "watch": "watch",
}

__all__ = sorted(_FRONT_DOOR)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _FRONT_DOOR:
        raise AttributeError(f"module 'gradsight' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"gradsight.{_FRONT_DOOR[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
