"""Where the samples are in a tensor."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """Which dimension holds the samples, and how.

    `kind` is "plain" (one entry per sample), "major" (samples outside, several entries each, as
    after flattening [B, T]), "minor" (samples inside, as after flattening [T, B]) or "all" (there
    is but one sample: everything is its own).
    """

    dim: int = 0
    kind: str = "plain"

    def rows(self, tensor: Tensor, batch: int) -> Tensor:
        """The tensor with one leading entry per sample; a view.

        >>> SampleLayout(1).rows(torch.zeros(3, 2, 5), 2).shape
        torch.Size([2, 3, 5])
        >>> SampleLayout(0, "minor").rows(torch.arange(6), 2).tolist()
        [[0, 2, 4], [1, 3, 5]]
        """
        if self.kind == "all":
            return tensor.unsqueeze(0)
        if self.kind == "plain":
            return tensor.movedim(self.dim, 0)
        if self.kind == "major":
            return torch.unflatten(tensor, self.dim, (batch, -1)).movedim(self.dim, 0)
        return torch.unflatten(tensor, self.dim, (-1, batch)).movedim(self.dim + 1, 0)

    def matrices(self, tensor: Tensor, batch: int) -> Tensor:
        """The tensor as [samples, positions, features]; a view where that is possible.

        >>> SampleLayout(1).matrices(torch.zeros(3, 2, 5), 2).shape
        torch.Size([2, 3, 5])
        """
        if self.dim == 0 and self.kind in LEADING:
            same = tensor.dim() == 3 and tensor.shape[0] == batch
            return tensor if same else tensor.reshape(batch, -1, tensor.shape[-1])
        return self.rows(tensor, batch).reshape(batch, -1, tensor.shape[-1])


LEADING = frozenset({"plain", "major", "all"})
"""The kinds by which, in dimension 0, each sample's entries lie side by side."""
ALL = SampleLayout(kind="all")

Key = tuple[str, ...]
"""A use of parameters: the operation, and the names of the parameters."""


@dataclass(frozen=True, slots=True)
class Place:
    """A use of parameters in a pass: all that the layout of the samples there may depend on."""

    use: Key
    shape: tuple[int, ...]
    """Of the tensor that holds the samples."""
    batch: int
    """How many samples there are."""
    path: int
    """How rows were picked before this use; 0 where they were not."""


def candidates(shape: Iterable[int], batch: int, preferred: int = 0) -> list[SampleLayout | None]:
    """Every way such a tensor could hold the samples, likeliest first; None stands for none."""
    sizes = tuple(shape)
    fitting = (d for d in range(len(sizes)) if sizes[d] == batch)
    dims = sorted(fitting, key=lambda d: (d != preferred, d))
    ways: list[SampleLayout | None] = [SampleLayout(d) for d in dims]
    if sizes and sizes[0] > batch and sizes[0] % batch == 0:
        flat = [SampleLayout(0, "major"), SampleLayout(0, "minor")]
        if preferred != 0:
            flat.reverse()
        ways += flat
    return [*ways, None]


class LayoutMemory:
    """Where the samples are at each place, kept over the run.

    A layout is trusted at the very place where it was proven and at no other. At a new place the
    layouts that were proven for the same use are tried first: in a batch that is as large as its
    rows are long, the shapes alone would mislead.
    """

    def __init__(self, preferred: int = 0) -> None:
        self.preferred = preferred
        """The likely dimension of the samples."""
        self._assumed: dict[Place, SampleLayout | None] = {}
        self._ways: dict[Place, list[SampleLayout | None]] = {}
        """The layouts to try at places that are not proven, likeliest first."""
        self._proven: dict[Key, SampleLayout | None] = {}
        """The layout that was last proven for each use."""

    def find(self, place: Place, preferred: int | None = None) -> SampleLayout | None:
        """The layout at a place; None: the samples are not in rows there."""
        if place.batch == 1:
            return ALL
        if place not in self._assumed:
            likely = self.preferred if preferred is None else preferred
            ways = candidates(place.shape, place.batch, likely)
            known = self._proven.get(place.use, ways[0])
            if known in ways:
                ways.sort(key=lambda way: way != known)
            self._ways[place] = ways
            self._assumed[place] = ways[0]
        return self._assumed[place]

    def is_proven(self, place: Place) -> bool:
        """Whether the layout at a place was proven there."""
        return place.batch == 1 or (place in self._assumed and place not in self._ways)

    def advance(self, place: Place) -> bool:
        """Assume the next layout at an unproven place; False when that is the first again."""
        ways = self._ways.get(place)
        if ways is None:
            return False
        position = (ways.index(self._assumed[place]) + 1) % len(ways)
        self._assumed[place] = ways[position]
        return position > 0

    def prove(self, places: Iterable[Place]) -> None:
        """Trust what is assumed at these places."""
        for place in places:
            if self._ways.pop(place, None) is not None:
                self._proven[place.use] = self._assumed[place]

    def forget_unproven(self) -> None:
        """Drop the assumptions that were not proven."""
        for place in self._ways:
            del self._assumed[place]
        self._ways.clear()

    def clear(self) -> None:
        """Forget every place; what was proven for a use is still tried first."""
        self._assumed.clear()
        self._ways.clear()
