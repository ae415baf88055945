"""training_log.json: what a run printed, for programs to read. No torch."""

import json
import math
from pathlib import Path
from typing import Any

from gradsight.core import limits, rundir
from gradsight.core.files import write_text
from gradsight.core.places import read_file
from gradsight.errors import RunError
from gradsight.store.run_problems import RunProblems
from gradsight.values.findings import Damage

_UNWRITTEN_SHARE = 0.01
"""Of the entries: the file is rewritten whole, so each time it must have grown by some share, or a
long run would spend its time on it."""


class TrainingLog:
    """One object per step that was logged or evaluated, in one array; NaN is null.

    `step` is how many steps had been made. An object has loss, lr and grad_norm of the step that
    was made last, or the losses of an evaluation, or both. The file is rewritten whole or not at
    all.
    """

    def __init__(self, run_dir: Path, up_to: int, problems: RunProblems) -> None:
        """The log of a run; of one that is resumed, the entries up to a step."""
        self._problems = problems
        self._file = run_dir / rundir.TRAINING_LOG
        entries = [entry for entry in _read(run_dir) if entry["step"] <= up_to]
        self._by_step: dict[int, dict[str, Any]] = {entry["step"]: entry for entry in entries}
        self._unwritten = 0

    def add(self, entry: dict[str, Any]) -> None:
        """Add what is known of a step; the file may have it a few entries later."""
        plain = {name: _finite(value) for name, value in entry.items()}
        self._by_step[entry["step"]] = {**self._by_step.get(entry["step"], {}), **plain}
        self._unwritten += 1
        if self._unwritten >= _UNWRITTEN_SHARE * len(self._by_step):
            self.write()

    def write(self) -> None:
        """Put everything into the file; training survives a failure."""
        if not self._unwritten:
            return
        self._unwritten = 0
        entries = list(self._by_step.values())
        lines = ",\n ".join(json.dumps(entry) for entry in entries)
        try:
            write_text(self._file, f"[\n {lines}\n]\n")
        except OSError as error:
            text = f"{self._file} cannot be written: {error.strerror}. Training goes on"
            self._problems.report("training-log", text, entries[-1]["step"])


def _finite(value: Any) -> Any:
    """The value; None for NaN and Inf, which JSON does not know."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def find_log_damage(run_dir: Path) -> Damage | None:
    """What is wrong with the log of a run; it has no checksum, being one array of plain objects."""
    try:
        _read(run_dir)
    except RunError as error:
        return Damage(rundir.TRAINING_LOG, str(error))
    return None


def _read(run_dir: Path) -> list[dict[str, Any]]:
    """The entries of a run that is resumed."""
    try:
        entries: Any = json.loads(read_file(run_dir, rundir.TRAINING_LOG, limits.DOCUMENT_BYTES))
    except FileNotFoundError:
        return []
    except (OSError, RunError, ValueError, RecursionError) as error:
        raise _unreadable(run_dir, str(error)) from error
    if not isinstance(entries, list):
        raise _unreadable(run_dir, f"it should hold an array, and holds {entries!r:.80}")
    for entry in entries:
        if not isinstance(entry, dict) or type(entry.get("step")) is not int:
            raise _unreadable(run_dir, f"an entry has no step: {entry!r:.80}")
    return entries


def _unreadable(run_dir: Path, why: str) -> RunError:
    file = run_dir / rundir.TRAINING_LOG
    return RunError(f"{file} cannot be read: {why}. Move it away to go on without what it holds")
