"""Where numbers go besides the run directory: one file per tracker, opened by name.

A sink is anything with `log_scalar(name, value, step)`. It may also have `log_scalars(values,
step)`, which is asked instead where there are many, `log_histogram(name, histogram, step)` and
`close()`. Those of ours that are a `StepSink` get each step as one row.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from gradsight.errors import MissingPackage, UsageError
from gradsight.store.sinks.step_sink import SinkPlace
from gradsight.values.steps import ScalarTracker

_NAMED = {
    "console": "ConsoleSink",
    "tensorboard": "TensorBoardSink",
    "trackio": "TrackioSink",
    "wandb": "WandbSink",
}


def open_sinks(sinks: Iterable[Any], place: SinkPlace) -> list[Any]:
    """Open the named sinks and check the user's own; what is wrong is an error before training."""
    if isinstance(sinks, str):
        sinks = (sinks,)
    return [_open(sink, place) for sink in sinks]


def refuse_unavailable(names: Iterable[str]) -> None:
    """Refuse a name that no sink has, or one whose package is missing, before torch is loaded."""
    for name in names:
        _refuse_unknown(name)
        if name != "console":  # every other is named as its package and its extra are
            MissingPackage.refuse(name, name, f"The sink {name!r}")


def _refuse_unknown(name: str) -> None:
    if name not in _NAMED:
        known = ", ".join(sorted(_NAMED))
        raise UsageError(f"there is no sink {name!r}; there are {known}, or an object of your own")


def _open(sink: Any, place: SinkPlace) -> Any:
    if isinstance(sink, str):
        _refuse_unknown(sink)
        # Imported by name, so that a tracker's package is needed only by those who use it.
        module = import_module(f"gradsight.store.sinks.{sink}")
        return getattr(module, _NAMED[sink])(place)
    if not isinstance(sink, ScalarTracker):
        raise UsageError(
            f"a sink needs a method log_scalar(name, value, step); {type(sink).__name__} has none"
        )
    return sink
