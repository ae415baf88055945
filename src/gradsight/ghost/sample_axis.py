"""Where the samples are in a tensor."""

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

    def fits(self, shape: torch.Size, batch: int) -> bool:
        """Whether a tensor of this shape can hold `batch` samples this way."""
        if self.kind == "all":
            return batch == 1
        if self.dim >= len(shape):
            return False
        if self.kind == "plain":
            return shape[self.dim] == batch
        return shape[self.dim] > 0 and shape[self.dim] % batch == 0

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


def candidates(shape: torch.Size, batch: int, preferred: int = 0) -> list[SampleLayout | None]:
    """Every way such a tensor could hold the samples, likeliest first; None stands for none."""
    fitting = (d for d in range(len(shape)) if shape[d] == batch)
    dims = sorted(fitting, key=lambda d: (d != preferred, d))
    ways: list[SampleLayout | None] = [SampleLayout(d) for d in dims]
    if shape and shape[0] > batch and shape[0] % batch == 0:
        flat = [SampleLayout(0, "major"), SampleLayout(0, "minor")]
        if preferred != 0:
            flat.reverse()
        ways += flat
    return [*ways, None]


class LayoutMemory:
    """What is known of the layout at each use of a parameter, kept over the run.

    A layout is a property of the model's code, so what was proven once holds for later batches
    whose shapes could mislead (a sequence as long as the batch is large). `unproven` holds the uses
    that no self-check has covered yet.
    """

    def __init__(self, preferred: int = 0) -> None:
        self.preferred = preferred
        self.unproven: set[Key] = set()
        self._known: dict[Key, list[SampleLayout | None]] = {}
        self._seen: dict[Key, tuple[torch.Size, int, int]] = {}

    def find(
        self, key: Key, shape: torch.Size, batch: int, preferred: int | None = None
    ) -> SampleLayout | None:
        """The layout of a tensor met at this use; None: the samples are not in rows here."""
        if batch == 1:
            return ALL
        fitting = [way for way in self._known.get(key, []) if way is None or way.fits(shape, batch)]
        if len(fitting) > 1:
            self.unproven.add(key)
        if fitting:
            return fitting[0]
        likely = self.preferred if preferred is None else preferred
        layout = candidates(shape, batch, likely)[0]
        if layout is None:
            # The samples are routed: other shapes at this use that fit a layout fit it by chance.
            self._known[key] = []
        self._known.setdefault(key, []).append(layout)
        self._seen[key] = (shape, batch, likely)
        self.unproven.add(key)
        return layout

    def advance(self, key: Key) -> bool:
        """Assume the next likely layout at an unproven use; False when that is the first again."""
        if key not in self.unproven or key not in self._seen:
            return False
        ways = candidates(*self._seen[key])
        position = (ways.index(self._known[key].pop()) + 1) % len(ways)
        self._known[key].append(ways[position])
        return position > 0

    def snapshot(self) -> dict[Key, list[SampleLayout | None]]:
        """What is assumed now."""
        return {key: list(ways) for key, ways in self._known.items()}

    def ambiguous(self) -> set[Key]:
        """The unproven uses whose shapes allow more than one layout."""
        unsure = set()
        for key in self.unproven:
            # One way and none at all leave no choice: where there are rows, they are the way.
            if key not in self._seen or len(candidates(*self._seen[key])) > 2:
                unsure.add(key)
        return unsure

    def prove(self) -> None:
        """Take every layout found so far for proven."""
        self.unproven.clear()
        self._seen.clear()
