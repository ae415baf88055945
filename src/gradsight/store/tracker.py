"""MetricsTracker: scalars and histograms by name, to the run directory, W&B and TensorBoard."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsight.core.problems import Problems
from gradsight.errors import MissingPackage, UsageError
from gradsight.store.sinks import open_sinks
from gradsight.store.store import Store, open_store
from gradsight.values.histograms import Histogram


class MetricsTracker:
    """Takes numbers under a name and a step. Usable as a context manager.

    A missing W&B is one warning, and the rest goes on.

    run_dir: where the numbers are recorded; None records nothing on disk.
    use_wandb: whether they go to W&B too.
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
        self._path = Path(run_dir) if run_dir is not None else None
        self.use_wandb = use_wandb
        """Whether W&B is being used; False if it was asked for and is not installed."""
        self._sinks: list[Any] = []
        self._store: Store | None = None
        self._problems = Problems()
        if self._path is not None:
            self._store = open_store(self._path)
            self._problems = self._store.problems
        # A store that stays open would keep its thread, and the run locked.
        try:
            if use_tensorboard:
                self._sinks += open_sinks(["tensorboard"], self._path)
            if use_wandb:
                self._open_wandb()
        except BaseException:
            self.close()
            raise

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """One number."""
        self.log_scalars({name: value}, step)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Many numbers of one step."""
        plain = {name: float(value) for name, value in values.items()}
        step = _whole(step)
        if self._store is not None:
            self._store.add_scalars(step, plain)
        self._each("log_scalars", plain, step)

    def log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """One histogram."""
        step = _whole(step)
        if self._store is not None:
            self._store.add_histograms(step, [histogram], source=name)
        self._each("log_histogram", name, histogram, step)

    def log_epoch(self, epoch: int, **metrics: float) -> None:
        """The metrics of an epoch, with the epoch as their step."""
        self.log_scalars(metrics, epoch)

    def close(self) -> None:
        """Write what is left. Closing again does nothing."""
        self._each("close")
        self._sinks = []
        if self._store is not None:
            self._store.close()
            self._store = None

    def __enter__(self) -> "MetricsTracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_wandb(self) -> None:
        try:
            self._sinks += open_sinks(["wandb"], self._path)
        except MissingPackage as error:
            self.use_wandb = False
            self._problems.report("sink-wandb", f"{error}. Going on without W&B.")

    def _each(self, method: str, *args: Any) -> None:
        """Ask every sink; one that fails is switched off with one message."""
        for sink in list(self._sinks):
            try:
                getattr(sink, method)(*args)
            except Exception as error:
                self._sinks.remove(sink)
                name = type(sink).__name__
                self._problems.report(
                    f"sink-{name}",
                    f"the sink {name} failed and is switched off: {type(error).__name__}: {error}",
                )


def _whole(step: int) -> int:
    if int(step) != step or step < 0:
        raise UsageError(f"a step is a whole number from 0 on, got {step!r}")
    return int(step)
