"""How large a rank's own gradients are: per parameter, over all backward passes of a step.

DistributedDataParallel reduces inside backward, so `.grad` never shows them. A hook on the
parameter does: it runs before the gradient is accumulated, and so before DDP puts it into a bucket.
Under FSDP2 the parameters that backward reaches are temporary, and what is left afterwards is
reduced and scattered: there is nothing to see there.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsight.core.guard import Guard
from gradsight.measure.flatten import flat
from gradsight.measure.host_copy import HostCopy
from gradsight.values.measured import Floats


class LocalNorms:
    """Adds up squared norms on the device, as backward brings the gradients of some parameters.

    Micro-batches count one by one: their gradients are never added up here.
    """

    def __init__(self, parameters: Sequence[Tensor], guard: Guard) -> None:
        self._parameters = parameters
        self._guard = guard
        self._handles: dict[int, Any] = {}
        self._squares: dict[int, Tensor] = {}

    def watch(self, rows: Collection[int]) -> None:
        """See these parameters from now on, and no others."""
        for row in self._handles.keys() - set(rows):
            self._handles.pop(row).remove()
        for row in rows:
            if row not in self._handles:
                hook = partial(self._guard.run, self.see, row)
                handle = self._parameters[row].register_hook(hook)  # type: ignore[no-untyped-call]
                self._handles[row] = handle

    def see(self, row: int, gradient: Tensor) -> None:
        """A backward pass brings this gradient to a parameter."""
        with torch.no_grad():
            wide = torch.promote_types(gradient.dtype.to_real(), torch.float32)
            # Squares add up over micro-batches; norms do not.
            square = torch.linalg.vector_norm(flat(gradient.detach()), dtype=wide).square()
            known = self._squares.get(row)
            self._squares[row] = square if known is None else known + square

    def take(self) -> "LocalReading":
        """What has been seen since the last time."""
        squares = self._squares
        self._squares = {}
        return LocalReading(squares)


class LocalReading:
    """The norms of one step, on their way from the device."""

    def __init__(self, squares: dict[int, Tensor]) -> None:
        rows: dict[torch.device, list[int]] = {}
        for row, square in squares.items():
            rows.setdefault(square.device, []).append(row)
        self._arrivals = [
            (rows, HostCopy.of(torch.stack([squares[row] for row in rows])))
            for rows in rows.values()
        ]

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(arrival.ready() for _, arrival in self._arrivals)

    def read(self, size: int, seen: Sequence[int]) -> Floats:
        """Norms over all parameters.

        0 where one was looked at and got nothing, -1 where it was not looked at.
        """
        result = np.full(size, -1.0)
        result[list(seen)] = 0.0
        for rows, arrival in self._arrivals:
            result[rows] = np.sqrt(arrival.read())
        return result


def exact_local_norms(gradients: Sequence[Sequence[Tensor]]) -> list[float]:
    """The plain twin, over [micro-batch][parameter].

    The root of the sum of squares of each parameter's own gradients.
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
