"""Every error of ours, and the warning that stands for a fault which training survived.

GradsightError                a thing we refuse: what was expected, what came, what to do
|-- UsageError (ValueError)   an argument or a call that cannot be meant
|-- RunError                  a run directory that cannot be read or written
`-- MissingPackage            an optional package is not installed; carries the install line

GradsightWarning              a fault of ours, or a doubtful situation; training goes on
"""


class GradsightError(Exception):
    """The base of every error of ours."""


class UsageError(GradsightError, ValueError):
    """An argument or a call that cannot be meant."""


class RunError(GradsightError):
    """A run directory that cannot be read or written."""


class MissingPackage(GradsightError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}. "
            f"Install it with: pip install 'gradsight[{extra}]'"
        )


class GradsightWarning(UserWarning):
    """A fault of ours, or a doubtful situation; training goes on."""
