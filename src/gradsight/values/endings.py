"""How a failed script ended. This module does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossAtEnd:
    """The loss of a step that never happened, because the script failed."""

    step: int
    """The number of that step."""
    name: str
    """The variable that holds the loss."""
    state: str
    """"nan" or "inf"."""
    place: str
    """File and line where the script ended, in the function of that variable."""
    inputs: tuple[str, ...] = ()
    """Descriptions of other variables of that function that contain NaN, such as a batch."""
