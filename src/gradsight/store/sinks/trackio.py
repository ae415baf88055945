"""Trackio, which keeps its metrics in a local database (TRACKIO_DIR)."""

from collections.abc import Mapping
from pathlib import Path

from gradsight.errors import MissingPackage
from gradsight.values.histograms import Histogram


class TrackioSink:
    """Logs to a Trackio run of its own, named like the run directory."""

    def __init__(self, run_dir: Path | None) -> None:
        try:
            import trackio
        except ImportError as error:
            raise MissingPackage("trackio", "trackio", "The sink 'trackio'") from error
        self._trackio = trackio
        name = run_dir.name if run_dir else None
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project="gradsight", name=name, resume="allow", **quiet)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take one number."""
        self.log_scalars({name: value}, step)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take many numbers of one step at once."""
        self._run.log(dict(values), step=step)

    def log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """Take a histogram in bins of equal width."""
        self._run.log({name: self._trackio.Histogram(np_histogram=histogram.linear())}, step=step)

    def close(self) -> None:
        """Send what is left and end the run."""
        # finish() ends the run that is current, which may be one of the user's by now.
        if self._trackio.context_vars.current_run.get() is self._run:
            self._trackio.finish()
        else:
            self._run.finish()
