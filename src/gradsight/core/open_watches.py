"""Which parameters are being watched in this process, and into which run directory.

Whoever attaches to a script asks here first: a model that the script watches itself is recorded
once, where the script wants it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, slots=True)
class OpenWatch:
    """A watch that looks at these parameters now."""

    run_dir: Path | None
    parameters: frozenset[int]
    """Their ids; the watch keeps them alive."""


_open: dict[int, OpenWatch] = {}


def note_open(watch: object, run_dir: Path | None, parameters: Iterable[Tensor]) -> None:
    """A watch has begun to look at these parameters."""
    _open[id(watch)] = OpenWatch(run_dir, frozenset(map(id, parameters)))


def note_closed(watch: object) -> None:
    """It has ended."""
    _open.pop(id(watch), None)


def count_open() -> int:
    """Return how many watches look at parameters now."""
    return len(_open)


def open_watch_of(parameters: Iterable[Tensor]) -> OpenWatch | None:
    """The watch that looks at any of these parameters; None where none does."""
    asked = set(map(id, parameters))
    for each in list(_open.values()):
        if each.parameters & asked:
            return each
    return None
