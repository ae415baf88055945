"""Faults of parts that have a run directory, but perhaps no watch, for the run's record."""

import contextlib
import os

from gradsight.core.problems import Problems
from gradsight.store.store import open_store


class RunProblems:
    """Says a fault once, counts it, and writes it into the run's record.

    Where a watch of this process has the record open, it is shared; else it is opened for a moment.
    Where the record cannot be opened, the next fault brings the earlier ones along.

    run_dir: None where there is no run directory, and on every rank but the first: two processes
    cannot have one record open, and the first rank's watch must find it free.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None) -> None:
        self._run_dir = run_dir
        self._problems = Problems()

    def report(self, key: str, message: str, step: int | None = None) -> None:
        """Say a fault the first time, count and record it every time."""
        self._problems.report(key, message, step)
        self._write()

    def record(self, key: str, message: str, step: int | None = None) -> None:
        """Count and record a fault that somebody else says, by an error for instance."""
        self._problems.count(key, message, step)
        self._write()

    def _write(self) -> None:
        if self._run_dir is not None:
            # The fault has been said, and must not become a second one that ends the training.
            with contextlib.suppress(Exception):
                self._record(self._run_dir)

    def _record(self, run_dir: str | os.PathLike[str]) -> None:
        # For a moment only: kept open, it would lock the run against other processes, and somebody
        # would have to close it.
        store = open_store(run_dir)
        try:
            for problem in self._problems.take_changed():
                store.add_problem(problem)
        finally:
            # A record is not copied for one fault: it stays in the tail until a run ends.
            store.close(publish=False)
