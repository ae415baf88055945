"""The options of a watched run: one frozen value, checked when it is made."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradsight.core.rundir import directory_path
from gradsight.dump.dumper import GradientDumper
from gradsight.errors import UsageError
from gradsight.incidents.recorder import SECONDS
from gradsight.session.on_finding import SKIP, FindingActions, finding_actions
from gradsight.values.sizes import format_size, parse_size
from gradsight.values.steps import Schedule
from gradsight.values.whole_numbers import whole_number

LEAST_BYTES = 500_000
"""A record below that would be nothing but its tables."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What `watch` was asked for beside a model and its optimizers; `watch` documents each."""

    run_dir: str | os.PathLike[str] | None = None
    sinks: tuple[object, ...] = ()
    stats: Schedule = field(default_factory=Schedule)
    histograms: Schedule = field(default_factory=lambda: Schedule(step_interval=50))
    health: bool | Mapping[str, object] | str | os.PathLike[str] = True
    dump: GradientDumper | None = None
    recorder: bool | str = True
    start_step: int | None = None
    sink_detail: str | None = None
    diagnose_seconds: float = SECONDS
    quiet: bool = False
    on_finding: object = None
    max_bytes: int | None = None
    preflight: bool | str = True
    stop_raises: bool = True
    """Whether stopping for a finding is an exception; a trainer's door stops its trainer itself."""

    attached: bool = False
    """Whether a command watches a script that never calls `watch`: no advice speaks of it then."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sinks", sinks_given(self.sinks))
        if self.run_dir is not None:
            directory_path(self.run_dir, "run_dir")
        for name in ("stats", "histograms"):
            _check_schedule(name, getattr(self, name))
        if self.health is None:
            raise UsageError(
                "health must be True, False, {code: settings} or a TOML file, got None"
            )
        if self.dump is not None and not isinstance(self.dump, GradientDumper):
            raise UsageError(
                "dump must be a GradientDumper, such as gradsight.GradientDumper(run_dir), "
                f"got {self.dump!r}"
            )
        if self.dump is not None and self.dump.is_closed:
            raise UsageError(
                "dump is a GradientDumper that was closed: make a new one for this run"
            )
        if not isinstance(self.quiet, bool):
            raise UsageError(f"quiet must be True or False, got {self.quiet!r}")
        if not isinstance(self.preflight, bool) and self.preflight != "whole":
            raise UsageError(f"preflight must be True or False, got {self.preflight!r}")
        if self.sink_detail not in (None, "parameters", "blocks"):
            raise UsageError(
                f"sink_detail must be 'parameters' or 'blocks', got {self.sink_detail!r}"
            )
        if not isinstance(self.recorder, bool) and self.recorder != "batch":
            raise UsageError(f'recorder must be True, False or "batch", got {self.recorder!r}')
        seconds = self.diagnose_seconds
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not seconds >= 0:
            raise UsageError(f"diagnose_seconds must be 0 or more, got {seconds!r}")
        if self.start_step is not None:
            number = whole_number(self.start_step, "start_step")
            object.__setattr__(self, "start_step", number)  # as Python's own, also if numpy's
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", _bytes_of_record(self.max_bytes))
        self._check_actions()

    def _check_actions(self) -> None:
        actions = self.actions()
        if actions is not None and self.health is False and not actions.is_only(SKIP):
            raise UsageError("on_finding acts on findings, but health=False judges nothing")

    def actions(self) -> FindingActions | None:
        """What is to be done about findings; None where nothing is."""
        return finding_actions(self.on_finding)

    def for_the_record(self, first_step: int) -> dict[str, Any]:
        """The settings as config.json keeps them."""
        actions = self.actions()
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
            "max_bytes": self.max_bytes,
            "preflight": self.preflight,
            "health": health,
            "on_finding": None if actions is None else actions.for_the_record(),
        }


def _bytes_of_record(given: object) -> int:
    """What a record may take, as a number of bytes."""
    size = parse_size(given)  # type: ignore[arg-type]  # it refuses in words what is no size
    if size < LEAST_BYTES:
        least = format_size(LEAST_BYTES)
        raise UsageError(f"max_bytes must be at least {least}, got {given!r}")
    return size


def sinks_given(sinks: object) -> tuple[object, ...]:
    """The sinks that a user names: one, several, or none."""
    if sinks is None:
        return ()
    if isinstance(sinks, str) or hasattr(sinks, "log_scalar"):
        sinks = (sinks,)
    if isinstance(sinks, Mapping) or not isinstance(sinks, Iterable):
        raise UsageError(
            'sinks must be a sequence of names, such as ["tensorboard"], and of objects with a '
            f"method log_scalar(name, value, step), got {type(sinks).__name__}"
        )
    given = tuple(sinks)
    for each in given:
        if isinstance(each, type):
            raise UsageError(
                f"sinks must be objects, got the class {each.__name__}: make one of it"
            )
    return given


def _check_schedule(name: str, given: object) -> None:
    if isinstance(given, Schedule):
        return
    # A bare number is meant as an interval.
    interval = 50
    if isinstance(given, int) and given > 1:
        interval = given
    raise UsageError(
        f"{name} must be a Schedule, such as gradsight.Schedule(step_interval={interval}), "
        f"got {given!r}"
    )
