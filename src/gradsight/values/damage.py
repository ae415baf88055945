"""What is wrong with a file of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Damage:
    """A file that is not as it was written."""

    path: str
    """Relative to the run directory."""
    what: str
    """What is wrong, and what that means."""
