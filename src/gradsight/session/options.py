"""The options of a watched run: one frozen value, checked when it is made."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradsight.dump.dumper import GradientDumper
from gradsight.errors import UsageError
from gradsight.values.steps import Schedule


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What `watch` was asked for beside a model and its optimizers; `watch` documents each."""

    run_dir: str | os.PathLike[str] | None
    sinks: tuple[object, ...]
    stats: Schedule
    histograms: Schedule
    health: bool | Mapping[str, object] | str | os.PathLike[str]
    dump: GradientDumper | None
    recorder: bool | str
    start_step: int | None
    sink_detail: str | None
    diagnose_seconds: float
    quiet: bool

    def __post_init__(self) -> None:
        if self.sink_detail not in (None, "parameters", "blocks"):
            raise UsageError(
                f"sink_detail must be 'parameters' or 'blocks', got {self.sink_detail!r}"
            )
        if self.recorder not in (True, False, "batch"):
            raise UsageError(f'recorder must be True, False or "batch", got {self.recorder!r}')
        seconds = self.diagnose_seconds
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not seconds >= 0:
            raise UsageError(f"diagnose_seconds must be 0 or more, got {seconds!r}")
        if self.start_step is not None and self.start_step < 0:
            raise UsageError(f"start_step must be 0 or more, got {self.start_step}")

    def for_the_record(self, first_step: int) -> dict[str, Any]:
        """The settings as config.json keeps them."""
        health = self.health
        if isinstance(health, os.PathLike):
            health = os.fspath(health)
        return {
            "stats": asdict(self.stats),
            "histograms": asdict(self.histograms),
            "start_step": first_step,
            "sink_detail": self.sink_detail,
            "recorder": self.recorder,
            "diagnose_seconds": self.diagnose_seconds,
            "health": health,
        }
