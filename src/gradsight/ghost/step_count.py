"""Which step an observed block belongs to, also in a run that is resumed, watched or told."""

from dataclasses import dataclass
from pathlib import Path

from gradsight.core import rundir
from gradsight.core.notices import notice
from gradsight.core.sharing import ModelGroup
from gradsight.core.watched_steps import watched_steps
from gradsight.errors import GradsightError, UsageError
from gradsight.store.reader import open_run
from gradsight.store.scores import scored_steps, step_after


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a run's scores begin, or go on; the same on every process."""

    step: int
    """That of the first block."""
    replaced_from: int
    """Scores that an earlier run has saved for this step and for later ones are replaced."""
    samples: int
    """How many samples were scored before."""


class StepCount:
    """Counts the steps of one engine; they only go forward."""

    def __init__(
        self, run_dir: Path | None, start_step: int | None, group: ModelGroup, by_optimizer: bool
    ) -> None:
        """start_step: the user's own; None is after the last step that the run directory holds."""
        self.first: StartingPoint | None = None
        """Known from the first block on: a watch that counts may be opened after the engine."""
        self.last = -1
        """The last block's step."""
        self._run_dir = run_dir
        self._start_step = start_step
        self._group = group
        self._by_optimizer = by_optimizer
        self._next = 0
        self.unobserved = 0
        """Steps of the optimizer before the first block."""

    def of_block(self, given: int | None) -> int:
        """A block's step: as given, as a watch counts, by the optimizer, or one per block."""
        if self.first is None:
            self.first = self._agreed(given)
            self._next = self.first.step
        step = self._next
        watched = watched_steps(self._run_dir)
        if given is not None:
            step = given
        elif watched is not None:
            step = watched.step
        if watched is not None and step != watched.step and not watched.by_hand:
            raise UsageError(
                f"observe(step={step}), but the watch on {self._run_dir} is at step {watched.step}:"
                " scores would stand beside another step's gradients. Leave step out, or tell the "
                f"watch: gradsight.watch(..., start_step={step})"
            )
        if step < self.last:
            raise UsageError(
                f"steps only go forward: step {step} after step {self.last}. To score steps again, "
                f"close this engine and make one with GhostEngine(..., start_step={step})"
            )
        self._next = step
        return step

    def block_scored(self, step: int) -> None:
        """A block of this step has its scores."""
        self.last = step
        if not self._by_optimizer:
            self._next = step + 1

    def optimizer_stepped(self) -> None:
        """The optimizer has made a step, or a GradScaler has left it out."""
        self._next += 1
        if self.first is None:
            self.unobserved += 1

    def _agreed(self, given: int | None) -> StartingPoint:
        """Rank 0's first step, or its error, on every process."""
        found: StartingPoint | GradsightError | None = None
        if self._group.is_first:
            try:
                found = self._find_first(given)
            except GradsightError as error:
                found = error
        found = self._group.from_first(found)
        if isinstance(found, GradsightError):
            raise found
        assert found is not None
        if given is not None and given != found.step:
            raise UsageError(
                f"observe(step={given}) on rank {self._group.rank}, but step {found.step} on "
                "rank 0: the ranks of a run count alike"
            )
        return found

    def _find_first(self, given: int | None) -> StartingPoint:
        step = self._found_step(given)
        if self._start_step is not None and step < self._start_step:
            raise UsageError(
                f"observe(step={step}) lies before start_step={self._start_step}, with which this "
                "engine was told to begin"
            )
        replaced_from = step
        if self._start_step is not None:
            replaced_from = self._start_step
        samples = 0
        if self._run_dir is not None:
            scored = scored_steps(self._run_dir)
            samples = int((scored < replaced_from).sum())
            if watched_steps(self._run_dir) is None:  # else the watch has said it
                _say_continued(self._run_dir, int(scored.max(initial=-1)), replaced_from)
        return StartingPoint(step, replaced_from, samples)

    def _found_step(self, given: int | None) -> int:
        watched = watched_steps(self._run_dir)
        start = self._start_step
        if watched is not None and start not in (
            None,
            watched.first,
            watched.step - self.unobserved,
        ):
            raise UsageError(
                f"start_step={start}, but the watch on {self._run_dir} began with step "
                f"{watched.first} and is at step {watched.step}: give both the same start_step"
            )
        if given is not None:
            return given
        if watched is not None:
            return watched.step
        if start is None:
            start = 0
            if self._run_dir is not None:
                start = next_step(self._run_dir)
        return start + self.unobserved


def _say_continued(run_dir: Path, last: int, replaced_from: int) -> None:
    """One line, where scores are added to a run's or take the place of some."""
    if last < 0:
        return
    if replaced_from > last:
        notice(f"continuing the scores of {run_dir} after step {last}")
    else:
        replaced = f"steps {replaced_from} to {last} are replaced"
        notice(f"continuing the scores of {run_dir}: {replaced}")


def next_step(run_dir: Path) -> int:
    """The step after the last one that a run directory holds, in its record or in its scores."""
    if not rundir.is_run(run_dir):
        return step_after(None, run_dir)
    run = open_run(run_dir)
    try:
        return run.next_step()
    finally:
        run.close()
