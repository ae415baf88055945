"""What our own sinks have in common: they know the run's place, and take a step as a whole."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from gradsight.values.histograms import Histogram


@dataclass(frozen=True, slots=True)
class SinkPlace:
    """The run that a sink is opened for."""

    run_dir: Path | None = None
    replaced_from: int | None = None
    """Recorded steps from this one on are made again; None where the run only goes on."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What sinks are told of a step."""

    step: int
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alert:
    """A finding, for the trackers that tell people of such."""

    title: str
    text: str
    severity: str
    """ "warning" or "critical"."""

    @property
    def level(self) -> str:
        """As trackers call it."""
        return "ERROR" if self.severity == "critical" else "WARN"


class StepSink(ABC):
    """A sink that takes all there is of a step at once."""

    def start(self) -> None:  # noqa: B027
        """Open what it writes to: on the thread that trains, when there is something to write.

        By then the user has opened a run of their own, if there is to be one.
        """

    @abstractmethod
    def log_step(self, row: StepRow) -> None:
        """Take a step; nothing more comes for it, save under its number by the user's own count."""
