"""MetricsTracker: scalars and histograms by name, to the run directory, W&B and TensorBoard."""

import os
from collections.abc import Mapping
from typing import Any

from gradsight.core.problems import Problems
from gradsight.core.rundir import directory_path
from gradsight.errors import MissingPackage, UsageError
from gradsight.store.sinks import open_sinks
from gradsight.store.sinks.step_sink import SinkPlace
from gradsight.store.sinks.switching_off import GuardedSinks
from gradsight.store.store import Store, open_store
from gradsight.values.histograms import Histogram
from gradsight.values.whole_numbers import single_number, whole_number

_APART = "tracker"
"""Names its own run in W&B and TensorBoard where a watch has one of the same directory."""


class MetricsTracker:
    """Takes numbers under a name and a step. Usable as a context manager.

    The steps are its own: epochs, or whatever is counted. On the run_dir of a watch they are kept
    apart from the optimizer's. A missing W&B or TensorBoard is one warning, and the rest goes on.

    run_dir: where the numbers are recorded; None records nothing on disk.
    use_wandb: whether they go to W&B too, to a run of the tracker's own.
    use_tensorboard: whether they go to TensorBoard too.

    >>> with MetricsTracker() as tracker:
    ...     tracker.log_scalar("loss", 2.5, step=0)
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        use_wandb: bool = False,
        use_tensorboard: bool = False,
    ) -> None:
        path = None if run_dir is None else directory_path(run_dir, "run_dir")
        self._place = SinkPlace(path)
        self._store: Store | None = None
        self._problems = Problems()
        self._sinks = GuardedSinks([], self._problems)
        self._started = False
        self._closed = False
        self._tensorboard: Any = None
        self._wandb: Any = None
        if self._place.run_dir is not None:
            self._store = open_store(self._place.run_dir)
            self._problems = self._store.problems
        # A store that stays open would keep its thread, and the run locked.
        try:
            if use_tensorboard:
                self._tensorboard = self._open("tensorboard", "TensorBoard")
            if use_wandb:
                self._wandb = self._open("wandb", "W&B")
        except BaseException:
            self.close()
            raise
        self.use_wandb = self._wandb is not None
        """Whether W&B is being used; False if it was asked for and is not installed."""
        self.use_tensorboard = self._tensorboard is not None
        """Whether TensorBoard is being used; False if it was asked for and is not installed."""
        sinks = [self._tensorboard, self._wandb]
        self._sinks = GuardedSinks([sink for sink in sinks if sink is not None], self._problems)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """One number."""
        self.log_scalars({name: value}, step)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Many numbers of one step."""
        plain = _plain(values)
        step = _whole(step)
        self._start()
        if self._store is not None:
            self._store.add_tracked(step, plain)
        self._sinks.log_scalars(plain, step)

    def log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """One histogram."""
        step = _whole(step)
        _check_name(name)
        if not isinstance(histogram, Histogram):
            raise UsageError(
                "log_histogram takes a histogram of Gradsight's, as log_gradient_distribution "
                f"makes it, got {type(histogram).__name__}"
            )
        self._start()
        if self._store is not None:
            self._store.add_histograms(step, [histogram], source=name)
        self._sinks.log_histogram(name, histogram, step)

    def log_epoch(self, epoch: int, **metrics: float) -> None:
        """The metrics of an epoch, with the epoch as their step."""
        self.log_scalars(metrics, epoch)

    def close(self) -> None:
        """Write what is left. Closing again does nothing."""
        self._closed = True
        self._sinks.close()
        if self._store is not None:
            self._store.close()
            self._store = None

    def __enter__(self) -> "MetricsTracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, sink: str, title: str) -> Any:
        """Open a sink by name; None where its package is missing."""
        try:
            (opened,) = open_sinks([sink], self._place)
        except MissingPackage as error:
            self._problems.report(f"sink-{title}", f"{error}. Going on without {title}.")
            return None
        return opened

    def _start(self) -> None:
        """The first numbers have come, or some that are too late."""
        if self._closed:
            self._problems.report("tracker", "this tracker is closed: nothing more is recorded")
        if self._started:
            return
        self._started = True
        store = self._store
        is_watched = store is not None and (store.recording or store.next_step() > 0)
        if not is_watched:
            return
        for sink in (self._tensorboard, self._wandb):
            if sink is not None:
                sink.set_apart(_APART)


def _plain(values: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise UsageError(f"log_scalars takes {{name: value}}, got {type(values).__name__}")
    for name in values:
        _check_name(name)
    return {name: single_number(value, name) for name, value in values.items()}


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise UsageError(f"the name of a number must be text, got {name!r}")


def _whole(step: float) -> int:
    # Epochs and tokens are counted in floats at times.
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    return whole_number(step, "step")
