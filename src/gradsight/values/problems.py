"""A fault of our own that training survived. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of Gradsight's own that training survived: said once, counted, shown in the report."""

    key: str
    message: str
    first_step: int
    count: int
