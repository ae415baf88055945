"""Trackio, which keeps its metrics in a local database (TRACKIO_DIR): a run of ours beside the
user's.
"""

import contextvars
from typing import Any

from gradsight.errors import MissingPackage
from gradsight.store.sinks.step_sink import Alert, SinkPlace, StepRow, StepSink

_QUIETLY = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


class TrackioSink(StepSink):
    """Logs to a Trackio run of its own, which is never the current one."""

    def __init__(self, place: SinkPlace) -> None:
        try:
            import trackio
        except ImportError as error:
            raise MissingPackage("trackio", "trackio", "The sink 'trackio'") from error
        self._trackio = trackio
        self._name = place.run_dir.name if place.run_dir else None
        self._run: Any = None

    def start(self) -> None:
        """Open our run, beside the user's where there is one by now."""
        options = {"project": "gradsight", "name": self._name, **self._beside(), **_QUIETLY}
        config = self._trackio.config
        # What is current is a context variable of Trackio's: in a context of its own, opening our
        # run neither ends the user's nor takes its place.
        self._run = contextvars.Context().run(self._trackio.init, **options)
        self._trackio.config = config

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take one number."""
        self.log_step(StepRow(step, {name: value}))

    def log_step(self, row: StepRow) -> None:
        """Take all there is of a step, as one row."""
        if self._run is None:
            self.start()
        # Trackio draws bins of equal width, so it gets those.
        pictures = {
            name: self._trackio.Histogram(np_histogram=histogram.linear())
            for name, histogram in row.histograms.items()
        }
        self._run.log({**row.scalars, **pictures}, step=row.step)

    def alert(self, alert: Alert) -> None:
        """Have Trackio tell people of a finding."""
        if self._run is None:
            self.start()
        level = self._trackio.AlertLevel(alert.level.lower())
        self._run.alert(alert.title, alert.text, level=level)

    def close(self) -> None:
        """Send what is left and end our run."""
        if self._run is not None:
            self._run.finish()

    def _beside(self) -> dict[str, Any]:
        """Arguments of trackio.init that put our run beside the user's, where there is one."""
        current = self._trackio.context_vars
        theirs = current.current_run.get()
        if theirs is None:
            return {}
        return {
            "project": theirs.project,
            "name": f"{theirs.name}-gradsight",
            "group": theirs.group,
            "space_id": current.current_space_id.get(),
        }
