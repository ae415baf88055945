"""A rank's own gradients under DistributedDataParallel, seen as backward brings them, before any
reduction.

DDP reduces inside backward, so `.grad` never shows them. A hook on the parameter does: it runs
before the gradient is accumulated, and so before DDP puts it into a bucket. Under FSDP2 the
parameters that backward reaches are temporary, and what is left afterwards is reduced and
scattered: there is nothing to see there.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor


class LocalGradients:
    """Tells `see` of every gradient that a backward pass brings to some parameters."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        see: Callable[[int, Tensor], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._parameters, self._see, self._failed = parameters, see, failed
        self._handles: dict[int, Any] = {}

    def watch(self, rows: Collection[int]) -> None:
        """See these parameters from now on, and no others."""
        for row in self._handles.keys() - set(rows):
            self._handles.pop(row).remove()
        for row in rows:
            if row not in self._handles:
                self._handles[row] = self._parameters[row].register_hook(self._hook(row))  # type: ignore[no-untyped-call]

    def _hook(self, row: int) -> Callable[[Tensor], None]:
        def seen(gradient: Tensor) -> None:
            try:
                self._see(row, gradient)
            except Exception as error:
                self._failed(error)

        return seen
