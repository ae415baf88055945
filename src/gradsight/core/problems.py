"""Faults that training survives: said once, counted, kept for the report. No torch."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsight.core.notices import log, write_line
from gradsight.errors import GradsightWarning
from gradsight.values.findings import Problem


class Problems:
    """The faults so far, by key. Whoever keeps a record asks for those that changed."""

    def __init__(self) -> None:
        self.step = -1
        """The step under way, for faults that are reported without one."""
        self._problems: dict[str, Problem] = {}
        self._changed: set[str] = set()
        self._lock = threading.RLock()

    def report(self, key: str, message: str, step: int | None = None) -> None:
        """Say a fault the first time, count it every time."""
        if self.count(key, message, step):
            say(message)

    def count(self, key: str, message: str, step: int | None = None) -> bool:
        """Count a fault without saying it; tell whether it is the first of its key."""
        with self._lock:
            known = self._problems.get(key)
            if known is None:
                first_step = self.step if step is None else step
                self._problems[key] = Problem(key, message, first_step, 1)
            else:
                # The first message stays: it is the one that was said, and that of first_step.
                self._problems[key] = replace(known, count=known.count + 1)
            self._changed.add(key)
        return known is None

    def add(self, problem: Problem) -> None:
        """Take over a fault that was said and counted elsewhere."""
        with self._lock:
            self._problems[problem.key] = problem
            self._changed.add(problem.key)

    def all(self) -> list[Problem]:
        """Every fault with its count."""
        with self._lock:
            return list(self._problems.values())

    def take_changed(self) -> list[Problem]:
        """The faults that are new, or were counted again, since this was last asked."""
        with self._lock:
            changed = [self._problems[key] for key in sorted(self._changed)]
            self._changed.clear()
        return changed


def say(message: str, stacklevel: int = 3, category: type[Warning] = GradsightWarning) -> None:
    """Warn, also where warnings are errors: a warning must not end somebody's training loop."""
    log(message)
    try:
        with _without_source_line():
            warnings.warn(message, category, stacklevel=stacklevel)
    except Exception:  # the warning itself, or what somebody's own way of showing it raised
        write_line(message)


_PYTHONS_OWN: Any = getattr(warnings, "_formatwarning_orig", None)
_OURS = f"{Path(__file__).resolve().parents[1]}/"


@contextlib.contextmanager
def _without_source_line() -> Iterator[None]:
    """Have Python print only the text of our warnings.

    Python adds the path and the source line of the caller, which is a line of Gradsight. A
    formatter that the user has set stays in place.
    """
    usual = warnings.formatwarning
    if usual is not _PYTHONS_OWN:
        yield
        return
    warnings.formatwarning = _formatted
    try:
        yield
    finally:
        if warnings.formatwarning is _formatted:
            warnings.formatwarning = usual


def show_lines_of_the_script() -> None:
    """Show warnings at lines of the script, not at lines of Gradsight, from now on.

    torch reports the caller of its function as the place of a warning. If the caller is
    Gradsight, the innermost line of the script is shown instead. Call this only in processes
    that Gradsight has started or entered, such as those of `gradsight check`.
    """
    if warnings.formatwarning is _PYTHONS_OWN:
        warnings.formatwarning = _formatted


def _formatted(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    if issubclass(category, GradsightWarning):
        return f"{category.__name__}: {message}\n"
    if filename.startswith(_OURS):
        from gradsight.core.source import users_place  # it loads torch

        filename, lineno = users_place() or (filename, lineno)
        line = None
    text: str = _PYTHONS_OWN(message, category, filename, lineno, line)
    return text
