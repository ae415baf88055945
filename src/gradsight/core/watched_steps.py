"""The steps that a watch of this process counts, for others who write into its run directory.

Their steps have to be the watch's: a score of step 12 belongs to the gradient of step 12.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class CountsSteps(Protocol):
    """Whoever counts steps."""

    @property
    def step(self) -> int:
        """The step under way."""


@dataclass(frozen=True, slots=True)
class WatchedSteps:
    """How a watch counts."""

    first: int
    """The step that it began with."""
    counter: CountsSteps
    by_hand: bool
    """Whether the user says when a step is over, and may skip numbers."""

    @property
    def step(self) -> int:
        """The step under way."""
        return self.counter.step


_by_run: dict[Path, WatchedSteps] = {}


def count_steps_of(run_dir: str | os.PathLike[str], steps: WatchedSteps) -> None:
    """A watch begins to count the steps of this run; there is one at a time."""
    _by_run[Path(run_dir).resolve()] = steps


def stop_counting(run_dir: str | os.PathLike[str]) -> None:
    """The watch has ended."""
    _by_run.pop(Path(run_dir).resolve(), None)


def watched_steps(run_dir: str | os.PathLike[str] | None) -> WatchedSteps | None:
    """How the watch of this run counts; None where there is none in this process."""
    if run_dir is None or not _by_run:
        return None
    return _by_run.get(Path(run_dir).resolve())
