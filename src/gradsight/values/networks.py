"""Networks of a script that no optimizer moves. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MovingOptimizer:
    """An optimizer of the script that steps, as advice names it."""

    variable: str | None = None
    """The expression by which the script reaches it."""
    made: str | None = None
    """Where it was made, as "file:line"."""
    call: str | None = None
    """Code that makes one with the same settings, with {given} for the parameters."""


@dataclass(frozen=True, slots=True)
class UnmovedNetwork:
    """A network that got gradients over many steps while none of its weights changed."""

    name: str
    parameters: int
    """How many of its parameters may learn."""
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
    parts: tuple[str, ...] = ()
    """The parts of it that get gradients, as the script reaches them; empty: all of it."""
    single: frozenset[str] = frozenset()
    """Those of the parts that are single parameters, not modules."""
    with_gradient: int | None = None
    """How many of its parameters get a gradient; None if all do."""
    moving: MovingOptimizer | None = None
    """An optimizer that steps after this network's backward pass, or any other that steps."""
    joins: bool = False
    """Whether that optimizer, and no other, steps after every pass that reaches this network."""
    held_twice: str | None = None
    """A network in two optimizers, one of which was probably meant for the unmoved network."""
    rivals: tuple[MovingOptimizer, ...] = ()
    """The two optimizers that hold it. If `is_known_which`, the meant one comes first."""
    is_known_which: bool = False
    """Whether it is known which of the two optimizers was meant for this network."""
    held_instead: str | None = None
    """A network of the same shapes that an optimizer holds, and that never got a gradient."""
    held_parameters: tuple[str, ...] = ()
    """The names in the record of its parameters, or of those of `held_twice`."""
    trained_instead: str | None = None
    """A network that began with the same weights and is trained."""
