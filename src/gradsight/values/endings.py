"""How a script ended that failed. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LossAtEnd:
    """The loss of a step that was never made, because the script failed."""

    step: int
    """The number of that step."""
    name: str
    """The variable that holds the loss."""
    state: str
    """"nan" or "inf"."""
    place: str
    """File and line where the script ended, in the function of that variable."""
    inputs: tuple[str, ...] = ()
    """Variables of that function whose values no operation of the model has made, and that are not
    finite either, each with its contents in words."""
