"""Experts of a mixture, and the norms of their gradients. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts that stand side by side: the slices of one tensor [E, ...], or modules of a list."""

    name: str
    """The tensor's name, or that of the list."""
    size: int
    """How many experts there are."""
    row: int | None = None
    """The tensor's place in the model's list of parameters; None where experts are modules."""
    members: tuple[tuple[int, ...], ...] = ()
    """By expert, where they are modules: the places of its parameters."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The places of all parameters that are in it."""
        if self.row is not None:
            return (self.row,)
        return tuple(row for members in self.members for row in members)


@dataclass(frozen=True, slots=True)
class ExpertStat:
    """The gradient of one expert at one step."""

    step: int
    group: str
    """The tensor [E, ...] whose slice it is, or the list of modules that it stands in."""
    expert: int
    l2: float
    """0 where it has none: no token came to it."""
