"""Which units of a layer are alive.

Rows of a weight whose gradient was not all zero at one of the last looks.
"""

from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from gradsight.measure.host_copy import HostCopy

_LOOKS = 4


class UnitLife:
    """Remembers the last looks at the rows of some weights.

    A unit is dead if all of them found its row zero.
    """

    def __init__(self, rows: Collection[int]) -> None:
        self._rows = frozenset(rows)
        self._looks: dict[int, deque[tuple[int, Tensor]]] = {
            row: deque(maxlen=_LOOKS) for row in self._rows
        }

    def look(self, step: int, rows: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Look at these gradients; several looks in one step are one."""
        with torch.no_grad():
            for row, gradient in zip(rows, gradients, strict=True):
                # Remembered as flags on the device: a count would have to be waited for.
                if row in self._rows and gradient.dim() >= 2 and gradient.layout is torch.strided:
                    self._remember(row, step, (gradient.detach() != 0).flatten(1).any(dim=1))

    def reading(self) -> "UnitReading":
        """The share of dead units of the weights with enough looks, on its way to the host."""
        shares: dict[torch.device, dict[int, Tensor]] = {}
        with torch.no_grad():
            for row, looks in self._looks.items():
                if len(looks) == _LOOKS and len({alive.shape for _, alive in looks}) == 1:
                    dead = ~torch.stack([alive for _, alive in looks]).any(dim=0)
                    shares.setdefault(dead.device, {})[row] = dead.float().mean()
            copies = [
                (list(by), HostCopy.of(torch.stack(list(by.values())))) for by in shares.values()
            ]
        return UnitReading(copies)

    def _remember(self, row: int, step: int, alive: Tensor) -> None:
        looks = self._looks[row]
        if looks and looks[-1][0] == step and looks[-1][1].shape == alive.shape:
            alive = alive | looks.pop()[1]
        looks.append((step, alive))


class UnitReading:
    """Shares of dead units, on their way from the device."""

    def __init__(self, copies: Sequence[tuple[list[int], HostCopy]]) -> None:
        self._copies = copies

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(copy.ready() for _, copy in self._copies)

    def read(self) -> dict[int, float]:
        """By row: the share of dead units."""
        return {
            row: share
            for rows, copy in self._copies
            for row, share in zip(rows, copy.read().tolist(), strict=True)
        }


def exact_dead_share(gradients: Sequence[Tensor]) -> float:
    """The plain twin: the share of rows that are zero in every one of these gradients."""
    size = len(gradients[0])
    dead = sum(
        all(not any(gradient[unit].flatten().tolist()) for gradient in gradients)
        for unit in range(size)
    )
    return dead / size
