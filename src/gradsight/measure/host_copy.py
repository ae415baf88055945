"""Numbers on their way from the device to the host, without anybody waiting for them."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class HostCopy:
    """A small vector that is being copied to the host.

    On an accelerator the copy goes to pinned memory and an event marks its end; on the CPU the
    numbers are there at once.
    """

    __slots__ = ("_event", "_host")

    def __init__(self, vector: Tensor) -> None:
        self._event: torch.Event | None = None
        if vector.device.type == "cpu":
            self._host = vector
        else:
            self._host = torch.empty(
                vector.shape, dtype=vector.dtype, pin_memory=vector.device.type == "cuda"
            )
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.Event(vector.device)
            self._event.record()

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> npt.NDArray[np.float64]:
        """The numbers, in float64. The one place that waits for a device."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy().astype(np.float64)
