"""How large a rank's own gradients are: per parameter, over all backward passes of a step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradsight.measure.flatten import flat
from gradsight.measure.host_copy import Arrival

Floats = npt.NDArray[np.float64]


class LocalNorms:
    """Adds up squared norms on the device. Micro-batches count one by one: their gradients are
    never added up here.
    """

    def __init__(self) -> None:
        self._squares: dict[int, Tensor] = {}

    def see(self, row: int, gradient: Tensor) -> None:
        """A backward pass brings this gradient to a parameter."""
        with torch.no_grad():
            wide = torch.float32 if gradient.device.type == "mps" else torch.float64
            square = torch.linalg.vector_norm(flat(gradient.detach()), dtype=wide).square()
            known = self._squares.get(row)
            self._squares[row] = square if known is None else known + square

    def take(self) -> "LocalLook":
        """What has been seen since the last time."""
        squares, self._squares = self._squares, {}
        return LocalLook(squares)


class LocalLook:
    """The norms of one step, on their way from the device."""

    def __init__(self, squares: dict[int, Tensor]) -> None:
        rows: dict[torch.device, list[int]] = {}
        for row, square in squares.items():
            rows.setdefault(square.device, []).append(row)
        self._arrivals = [
            (rows, Arrival(torch.stack([squares[row] for row in rows]))) for rows in rows.values()
        ]

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(arrival.ready() for _, arrival in self._arrivals)

    def read(self, size: int, seen: Sequence[int]) -> Floats:
        """Norms over all parameters: 0 where one was looked at and got nothing, -1 where it was not
        looked at.
        """
        result = np.full(size, -1.0)
        result[list(seen)] = 0.0
        for rows, arrival in self._arrivals:
            result[rows] = np.sqrt(arrival.read())
        return result


def exact_local_norms(gradients: Sequence[Sequence[Tensor]]) -> list[float]:
    """The plain twin, over [micro-batch][parameter]: the root of the sum of squares of each
    parameter's own gradients.
    """
    return [
        sum(
            float(value) ** 2
            for gradient in of_one
            for value in gradient.double().flatten().tolist()
        )
        ** 0.5
        for of_one in zip(*gradients, strict=True)
    ]
