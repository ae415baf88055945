"""Numbers that users hand in: steps, intervals and counts, and the values they log. No torch."""

import operator
from typing import SupportsFloat, SupportsIndex

from gradsight.errors import UsageError

LARGEST = 2**63 - 2
"""What the record, the score files and a number one higher have room for."""


def whole_number(given: object, name: str, least: int = 0) -> int:
    """A whole number from `least` on; anything else is an error that names the argument.

    Numbers of numpy and of torch are taken too.

    >>> whole_number(12, "start_step")
    12
    >>> whole_number(2.5, "step_interval", least=1)
    Traceback (most recent call last):
    gradsight.errors.UsageError: step_interval must be a whole number of 1 or more, got 2.5
    """
    expected = f"{name} must be a whole number of {least} or more"
    # Python counts True as 1: a switch in the place of a number is a mistake.
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        raise UsageError(f"{expected}, got {_shown(given)}")
    try:
        number = operator.index(given)
    except TypeError:  # a tensor of several numbers, or of fractions
        raise UsageError(f"{expected}, got {_shown(given)}") from None
    if number < least:
        raise UsageError(f"{expected}, got {number}")
    if number > LARGEST:
        raise UsageError(f"{name} must be below 2**63, got {_shown(number)}")
    return number


def single_number(given: object, name: str) -> float:
    """One number, also as a tensor of one entry; anything else is an error that names it.

    >>> single_number(3, "loss")
    3.0
    """
    try:
        if isinstance(given, SupportsFloat):
            return float(given)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers
        pass
    raise UsageError(f"{name} must be a single number, got {_shown(given)}")


def _shown(given: object) -> str:
    """A wrong value as an error shows it: short, with its type where that is the fault."""
    text = repr(given)
    if len(text) > 40:
        text = f"{text[:37]}..."
    if isinstance(given, int | float | str | bytes | None):
        return text
    if isinstance(getattr(given, "step", None), int):  # a step of the record
        return f"a {type(given).__name__}; pass its number, which is its `.step`"
    return f"{type(given).__name__} {text}"
