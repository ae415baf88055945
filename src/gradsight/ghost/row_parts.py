# mypy: allow-untyped-calls
"""Which rows of a joined batch are whose: the training rows first, then those of every target."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsight.ghost.sample_axis import SampleLayout


@dataclass(frozen=True, slots=True)
class RowParts:
    """The number of training rows, and of each target's rows behind them."""

    train: int
    targets: tuple[int, ...]

    @property
    def total(self) -> int:
        """All rows of the joined batch."""
        return self.train + sum(self.targets)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The training rows and each target's, in their order."""
        return (self.train, *self.targets)

    def of_target(self, tensor: Tensor, number: int) -> Tensor:
        """One target's rows of a tensor with the samples in dimension 0; a view.

        >>> RowParts(2, (1, 3)).of_target(torch.arange(6), 1).tolist()
        [3, 4, 5]
        """
        start = self.train + sum(self.targets[:number])
        return tensor.narrow(0, start, self.targets[number])

    def of_training(self, tensor: Tensor) -> Tensor:
        """The training rows of a tensor with the samples in dimension 0; a view."""
        return tensor.narrow(0, 0, self.train)


def pieces_of(tensor: Tensor, layout: SampleLayout, parts: RowParts) -> list[Tensor]:
    """Views of a tensor's rows, training's and each target's; for layouts without gaps."""
    entries = tensor.shape[layout.dim] // parts.total
    return list(tensor.split([rows * entries for rows in parts.sizes], layout.dim))


def joined_pieces(versions: Sequence[Tensor], layout: SampleLayout, parts: RowParts) -> Tensor:
    """A tensor whose training rows come from the first version, each target's from its own.

    >>> zeros, ones = torch.zeros(3), torch.ones(3)
    >>> joined_pieces([zeros, ones], SampleLayout(), RowParts(2, (1,))).tolist()
    [0.0, 0.0, 1.0]
    """
    dim = layout.dim
    if layout.kind == "minor":
        # Samples inside: [positions, samples] side by side in one dimension.
        opened = [torch.unflatten(each, dim, (-1, parts.total)) for each in versions]
        return joined_pieces(opened, SampleLayout(dim + 1), parts).flatten(dim, dim + 1)
    rows = [pieces_of(each, layout, parts)[number] for number, each in enumerate(versions)]
    return torch.cat(rows, dim)


def only_rows(tensor: Tensor, layout: SampleLayout, parts: RowParts, number: int) -> Tensor:
    """A copy with zeros everywhere but in the rows of training (0) or of a target.

    >>> only_rows(torch.ones(3), SampleLayout(), RowParts(2, (1,)), 1).tolist()
    [0.0, 0.0, 1.0]
    """
    kept = torch.zeros_like(tensor)
    mine = layout.rows(kept, parts.total).split(parts.sizes)[number]
    mine.copy_(layout.rows(tensor, parts.total).split(parts.sizes)[number])
    return kept
