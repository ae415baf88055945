"""Gradsight: what the gradients are doing, which samples push the model where, and what backward
costs in memory.

The names below are the whole public surface. They are loaded when first used, so that importing the
package imports neither torch nor numpy.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_FRONT_DOOR = {
    "GhostEngine": "ghost.engine",
    "GradientDumper": "dump.dumper",
    "GradsightError": "errors",
    "MemoryMonitor": "memory.monitor",
    "MetricsTracker": "store.tracker",
    "Schedule": "values.steps",
    "apply_checkpointing": "memory.apply",
    "check_gradient_health": "health.one_look",
    "get_checkpoint_metadata": "dump.reader",
    "load_keys": "dump.reader",
    "log_gradient_distribution": "measure.distribution",
    "measure_peak_memory": "memory.peak",
    "open_run": "store.reader",
    "plan_checkpointing": "memory.plan",
    "predict_peak_memory": "memory.predict",
    "verify_checkpointing": "memory.verify",
    "watch": "session.watch_session",
}

__all__ = sorted(_FRONT_DOOR)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _FRONT_DOOR:
        raise AttributeError(
            f"module 'gradsight' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(import_module(f"gradsight.{_FRONT_DOOR[name]}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Importing the module gradsight.watch must not put it in the place of the function of that
    name.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _FRONT_DOOR and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
