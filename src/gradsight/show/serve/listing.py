"""The runs of a folder with their verdicts, looked at again only where something was written."""

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from gradsight.errors import GradsightError
from gradsight.store.reader import open_run
from gradsight.store.run_listing import Fingerprint, fingerprint, runs_in
from gradsight.values.health_report import counted_causes, worst

DAMAGED = "damaged"
_SHARE = 0.1
"""Of the time that goes into looking: a hundred runs that are being written are many."""


@dataclass(frozen=True)
class ListedRun:
    """A run in one line."""

    name: str
    """Its path inside the folder."""
    status: str
    """ "healthy", "warning", "critical"; "damaged" where it cannot be read."""
    steps: int
    text: str
    """What was found, or why it cannot be read."""
    written: float
    """When something was last written to it, in seconds since the epoch."""


class Listing:
    """The runs below a folder; what did not change is not read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[Fingerprint, ListedRun]] = {}
        self._next_look = 0.0
        self._lock = threading.Lock()

    def runs(self) -> list[ListedRun]:
        """All runs that are there now, in the order of names."""
        with self._lock:
            began = time.monotonic()
            if began >= self._next_look:
                self._look()
                now = time.monotonic()
                self._next_look = now + (now - began) / _SHARE
            return [run for _, run in self._known.values()]

    def _look(self) -> None:
        known = {}
        for name, place in runs_in(self.folder).items():
            seen = fingerprint(place)
            before = self._known.get(name)
            if before is not None and before[0] == seen:
                known[name] = before
            else:
                known[name] = (seen, _look_at(name, place, seen))
        self._known = known


def _look_at(name: str, place: Path, seen: Fingerprint) -> ListedRun:
    written = max((stamp[2] for stamp in seen if stamp is not None), default=0) / 1e9
    try:
        with contextlib.closing(open_run(place)) as run:
            steps = run.next_step()
            findings = list(run.findings())
    except GradsightError as error:
        return ListedRun(name, DAMAGED, 0, str(error), written)
    status = worst(finding.severity for finding in findings)
    text = "no finding"
    if steps == 0:
        # As in a report: where no step was seen there is nothing to call healthy.
        status = worst([status, "warning"])
        text = "no step yet"
    if findings:
        text = counted_causes(findings)
    return ListedRun(name, status, steps, text, written)
