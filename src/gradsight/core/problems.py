"""Faults that training survives: said once, counted, kept for the report."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable

from gradsight.errors import GradsightWarning
from gradsight.values.problems import Problem


class Problems:
    """What went wrong so far, by key."""

    def __init__(self) -> None:
        self._found: dict[str, Problem] = {}
        self._lock = threading.RLock()  # a signal may close a watch while this is held
        self.step = -1
        """The step under way, for the record."""
        self.on_new: Callable[[Problem], None] | None = None

    def report(self, key: str, message: str) -> None:
        """Say it the first time, count it every time."""
        with self._lock:
            known = self._found.get(key)
            first_step, count = (known.first_step, known.count) if known else (self.step, 0)
            problem = self._found[key] = Problem(key, message, first_step, count + 1)
        if known is None:
            say(message)
            if self.on_new is not None:
                with contextlib.suppress(Exception):
                    self.on_new(problem)

    def add(self, problem: Problem) -> None:
        """One that was said and counted elsewhere."""
        with self._lock:
            self._found[problem.key] = problem

    def all(self) -> list[Problem]:
        """Every problem with its count."""
        with self._lock:
            return list(self._found.values())


def say(message: str) -> None:
    """A warning, which must not become an error in somebody's training loop even where warnings are
    errors.
    """
    try:
        warnings.warn(message, GradsightWarning, stacklevel=3)
    except GradsightWarning:
        print(f"gradsight: {message}", file=sys.stderr)
