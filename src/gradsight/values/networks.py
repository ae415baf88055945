"""Networks of a script that no optimizer moves. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnmovedNetwork:
    """A network that got gradients over many steps while none of its weights changed."""

    name: str
    parameters: int
    first_step: int
    """The first step at which it was seen with a gradient."""
    home: str | None = None
    """The model in whose record it belongs, where it has to do with one."""
    variable: str | None = None
    """The expression by which the script reaches it."""
    optimizer: str | None = None
    """The class of the optimizer that holds it and never stepped; None: no optimizer holds it."""
    optimizer_variable: str | None = None
    made: str | None = None
    """Where that optimizer was made, as "file:line"."""
    stepping_optimizer: str | None = None
    """The expression by which the script reaches an optimizer that steps."""
    held_instead: str | None = None
    """A network of the same shapes that an optimizer holds, and that never got a gradient."""
    held_parameters: tuple[str, ...] = ()
    """The names of its parameters in the record."""
    trained_instead: str | None = None
    """A network that began with the same weights and is trained."""
