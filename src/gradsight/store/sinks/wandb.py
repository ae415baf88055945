"""Weights & Biases, online or offline.

An active run of the user's is used and left open; else one is started and ended.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsight.errors import MissingPackage
from gradsight.values.histograms import Histogram


class WandbSink:
    """Logs to W&B under the run's own step."""

    def __init__(self, run_dir: Path | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingPackage("wandb", "wandb", "The sink 'wandb'") from error
        self._wandb = wandb
        self._own = wandb.run is None
        self._run: Any = wandb.run
        if self._own:
            if run_dir is not None:
                run_dir.mkdir(parents=True, exist_ok=True)
            project = os.environ.get("WANDB_PROJECT", "gradsight")
            name = run_dir.name if run_dir else None
            self._run = wandb.init(project=project, name=name, dir=run_dir)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take one number."""
        self.log_scalars({name: value}, step)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take many numbers of one step at once."""
        self._log(dict(values), step)

    def log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """Take a histogram; W&B draws bins of equal width, so it gets those."""
        picture = self._wandb.Histogram(np_histogram=histogram.linear())
        self._log({name: picture}, step)

    def close(self) -> None:
        """End the run if we started it."""
        if self._own:
            self._run.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        # W&B drops steps that it has already passed: those go to its current one.
        self._run.log(values, step=max(step, self._run.step))
