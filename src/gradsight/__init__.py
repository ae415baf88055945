"""Gradsight: what gradients do, which samples push the model where, what backward costs in memory.

The names below and `gradsight.integrations` are the whole public surface. They are loaded when
first used, so that importing the package imports neither torch nor numpy; editors and type checkers
see them as they are.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsight import integrations as integrations
    from gradsight.dump.dumper import GradientDumper
    from gradsight.dump.reader import get_checkpoint_metadata, load_keys
    from gradsight.errors import GradsightError
    from gradsight.ghost.engine import GhostEngine
    from gradsight.ghost.selection.domain_mixer import DomainMixer
    from gradsight.ghost.selection.influence_sampler import InfluenceSampler
    from gradsight.health.one_look import check_gradient_health
    from gradsight.measure.distribution import log_gradient_distribution
    from gradsight.memory.apply import apply_checkpointing
    from gradsight.memory.monitor import MemoryMonitor
    from gradsight.memory.peak import measure_peak_memory
    from gradsight.memory.plan import plan_checkpointing
    from gradsight.memory.predict import predict_peak_memory
    from gradsight.memory.verify import verify_checkpointing
    from gradsight.session.preflight import preflight
    from gradsight.session.watching import watch
    from gradsight.store.reader import open_run
    from gradsight.store.scores import read_scores
    from gradsight.store.tracker import MetricsTracker
    from gradsight.values.findings import StopTraining
    from gradsight.values.steps import Schedule

    _log_gradient_distribution = log_gradient_distribution

__all__ = [
    "DomainMixer",
    "GhostEngine",
    "GradientDumper",
    "GradsightError",
    "InfluenceSampler",
    "MemoryMonitor",
    "MetricsTracker",
    "Schedule",
    "StopTraining",
    "apply_checkpointing",
    "check_gradient_health",
    "get_checkpoint_metadata",
    "load_keys",
    "log_gradient_distribution",
    "measure_peak_memory",
    "open_run",
    "plan_checkpointing",
    "predict_peak_memory",
    "preflight",
    "read_scores",
    "verify_checkpointing",
    "watch",
]
__version__ = "0.2.0"

_HOMES = {
    "DomainMixer": "ghost.selection.domain_mixer",
    "GhostEngine": "ghost.engine",
    "GradientDumper": "dump.dumper",
    "GradsightError": "errors",
    "InfluenceSampler": "ghost.selection.influence_sampler",
    "MemoryMonitor": "memory.monitor",
    "MetricsTracker": "store.tracker",
    "Schedule": "values.steps",
    "StopTraining": "values.findings",
    "apply_checkpointing": "memory.apply",
    "check_gradient_health": "health.one_look",
    "get_checkpoint_metadata": "dump.reader",
    "load_keys": "dump.reader",
    "log_gradient_distribution": "measure.distribution",
    "measure_peak_memory": "memory.peak",
    "open_run": "store.reader",
    "plan_checkpointing": "memory.plan",
    "predict_peak_memory": "memory.predict",
    "preflight": "session.preflight",
    "read_scores": "store.scores",
    "verify_checkpointing": "memory.verify",
    "watch": "session.watching",
}
"""The module that each name is loaded from; the imports above say the same to type checkers."""
_OTHER_NAMES = {"_log_gradient_distribution": "log_gradient_distribution"}
"""Names that are in use for the same thing, but are not listed."""


def __dir__() -> list[str]:
    return [*__all__, "__version__", "integrations"]


# Hidden from type checkers: to them, a module with `__getattr__` has every name, as Any.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "integrations":
            return import_module("gradsight.integrations")
        known_as = _OTHER_NAMES.get(name, name)
        if known_as not in _HOMES:
            known = ", ".join(__all__)
            raise AttributeError(f"module 'gradsight' has no attribute {name!r}; it has {known}")
        value = getattr(import_module(f"gradsight.{_HOMES[known_as]}"), known_as)
        globals()[name] = value
        return value
