"""Every error of ours, and the warning that stands for a fault which training survived.

GradsightError                a thing we refuse: what was expected, what came, what to do
|-- UsageError (ValueError)   an argument or a call that cannot be meant
|   `-- CannotBeSeen          a way of training in which nothing true can be seen
|-- MissingPackage            an optional package is not installed; carries the install line
|-- UserCodeError             a function of the user's raised, where we called it
|-- StopTraining              a finding for which training was to be stopped, by on_finding="stop"
`-- RunError                  a run directory that is damaged, or is not as it should be
    `-- WrongPlace            there is no run, dump or incident at that place, or none for us

GradsightWarning              a fault of ours, or a doubtful situation; training goes on
"""

from importlib.util import find_spec
from typing import ClassVar

DIFFERENT = 1
"""The exit code of a command that compared two things and found a difference."""
LONGEST_TEXT = 240
"""Characters of another error's text that a GradsightError repeats: some of torch's fill a page."""
WRONG_USAGE = 64
"""As sysexits.h has it: nothing was judged, so it is none of the codes of a verdict."""


class GradsightError(Exception):
    """The base of every error of ours."""

    exit_code: ClassVar[int] = 2
    """What a command ends with that this error stops; 2 is "critical, or verification failed"."""


class UsageError(GradsightError, ValueError):
    """An argument or a call that cannot be meant."""

    exit_code = WRONG_USAGE


class CannotBeSeen(UsageError):
    """A way of training in which nothing true can be seen; the doors into trainers let it train."""


class MissingPackage(GradsightError, ImportError):
    """An optional package is not installed."""

    exit_code = WRONG_USAGE

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}. "
            f"Install it with: pip install 'gradsight[{extra}]'"
        )

    @classmethod
    def refuse(cls, package: str, extra: str, purpose: str) -> None:
        """Raise it where the package is missing; answers at once, for nothing is imported."""
        if find_spec(package) is None:
            raise cls(package, extra, purpose)


class UserCodeError(GradsightError):
    """A function of the user's raised, where we called it."""

    exit_code = 3


class RunError(GradsightError):
    """A run directory that is damaged, or is not as it should be."""


class WrongPlace(RunError):
    """There is no run, dump or incident at that place, or none that we can read or write.

    A pipeline must be able to tell a mistyped path from a finding, which a damaged run is.
    """

    exit_code = WRONG_USAGE


class GradsightWarning(UserWarning):
    """A fault of ours, or a doubtful situation; training goes on."""


def in_one_line(error: Exception) -> str:
    """Return an error's kind and the first line of its text.

    >>> in_one_line(ValueError("no.\\nMore of it."))
    'ValueError: no'
    """
    first = " ".join(str(error).strip().splitlines()[:1])
    if len(first) > LONGEST_TEXT:
        first = f"{first[:LONGEST_TEXT]} ..."
    return f"{type(error).__name__}: {first}".rstrip(" .:")
