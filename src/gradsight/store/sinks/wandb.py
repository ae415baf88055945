"""Weights & Biases, online or offline: a run of ours beside the user's.

W&B has one row open per run and drops what comes for a row that has been passed, so two who count
differently lose each other's rows. In a run of its own nothing of ours can touch the user's.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradsight.errors import MissingPackage
from gradsight.store.sinks.step_sink import Alert, SinkPlace, StepRow, StepSink
from gradsight.values.histograms import Histogram

STEP = "gradsight/step"
"""In every row: the optimizer's step, or a tracker's own."""
_TITLE = 63
"""Characters that W&B takes as the title of an alert."""
_OVER_STEP = ("gradients/*", "health/*", "memory/*", "*")
_QUIETLY = {
    "quiet": True,
    # The user's run has the terminal's output, the machine's load and the packages already.
    "console": "off",
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "finish_timeout": 45.0,
    "finish_timeout_raises": True,
}
"""Settings of our run; those that an older W&B does not know are left out."""
_NOT_OURS = {"sweep_id": None, "launch": False, "run_id": None, "resume": None}
"""What the environment says of the user's run: W&B would give ours the same id."""


class WandbSink(StepSink):
    """Logs to a W&B run of its own, which is never `wandb.run`."""

    def __init__(self, place: SinkPlace) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingPackage("wandb", "wandb", "The sink 'wandb'") from error
        self._wandb = wandb
        self._run_dir = place.run_dir
        self._suffix = ""
        self._run: Any = None
        self._started = False
        self._row = -1
        self._step: int | None = None
        """Of the row that is open."""

    def set_apart(self, name: str) -> None:
        """Be a run of this name beside the watch's, before the first numbers come."""
        self._suffix = f"-{name}"

    def start(self) -> None:
        """Open our run, beside the user's where there is one by now."""
        self._started = True
        theirs = self._wandb.run
        setup = self._wandb.setup()
        settings = setup.settings if theirs is None else theirs.settings
        # Switched off by the user. Opening a run in this mode would replace wandb.run.
        if settings.mode == "disabled":
            return
        options = self._options(theirs)
        with _set_aside(setup.settings, _NOT_OURS):
            self._run = self._wandb.init(reinit="create_new", **options)
        # Else a later wandb.init() of the user's would be given our run, or end it.
        setup.remove_active_run(self._run)
        self._run.define_metric(STEP)
        for names in _OVER_STEP:
            self._run.define_metric(names, step_metric=STEP)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """Take one number."""
        self._log({name: value}, step)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take many numbers of one step at once."""
        self._log(dict(values), step)

    def log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """Take a histogram."""
        self._log({name: self._picture(histogram)}, step)

    def log_step(self, row: StepRow) -> None:
        """Take all there is of a step, as one row."""
        pictures = {name: self._picture(histogram) for name, histogram in row.histograms.items()}
        self._log({**row.scalars, **pictures}, row.step, is_whole=True)

    def alert(self, alert: Alert) -> None:
        """Have W&B tell people of a finding."""
        if self._run is not None:
            self._run.alert(alert.title[:_TITLE], alert.text, level=alert.level)

    def close(self) -> None:
        """End our run."""
        if self._run is not None:
            self._run.finish()

    def _options(self, theirs: Any) -> dict[str, Any]:
        """Arguments of wandb.init: whatever lets the user find our run beside theirs."""
        known = {
            name: value
            for name, value in _QUIETLY.items()
            if name in self._wandb.Settings.model_fields
        }
        options: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "gradsight"),
            "job_type": "gradsight",
            "save_code": False,
            "settings": self._wandb.Settings(**known),
        }
        about = {}
        folder = self._run_dir
        if folder is not None:
            options["name"] = f"{folder.name}{self._suffix}"
            about["run_dir"] = str(folder)
        if theirs is not None:
            label = theirs.name or theirs.id
            about["beside"] = theirs.id
            options["name"] = f"{label}-gradsight{self._suffix}"
            options["project"] = theirs.project
            options["entity"] = theirs.entity or None
            options["group"] = theirs.group or None
            options["mode"] = "offline" if theirs.offline else "online"
            # In a folder of its own: theirs has a link to the latest run, and a note for resuming.
            folder = folder or Path(theirs.settings.wandb_dir) / "gradsight"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            options["dir"] = folder
        return {**options, "config": {"gradsight": about}}

    def _picture(self, histogram: Histogram) -> Any:
        # W&B draws bins of equal width, so it gets those.
        return self._wandb.Histogram(np_histogram=histogram.linear())

    def _log(self, values: dict[str, Any], step: int, is_whole: bool = False) -> None:
        if not self._started:
            self.start()
        if self._run is None:
            return
        # W&B's own count only goes up; it is the step itself wherever steps do too.
        if step != self._step:
            self._row = max(self._row + 1, step)
        self._run.log({STEP: step, **values}, step=self._row, commit=is_whole)
        self._step = None if is_whole else step


@contextlib.contextmanager
def _set_aside(settings: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Have these settings of the process for a moment."""
    before = {name: getattr(settings, name) for name in values}
    for name, value in values.items():
        setattr(settings, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
