"""Numbers on their way from the device to the host, without anybody waiting for them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsight.core.shards import local_part
from gradsight.values.measured import Floats


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A small vector that is being copied to the host.

    On an accelerator the copy goes to pinned memory and an event marks its end; on the CPU the
    numbers are there at once.
    """

    _host: Tensor
    _event: torch.Event | None = None

    @classmethod
    def of(cls, vector: Tensor) -> "HostCopy":
        """Start copying this vector, which nobody may write to any more."""
        vector = local_part(vector)
        device = vector.device
        if device.type == "cpu":
            return cls(vector)
        # Only a copy into pinned memory leaves the host free to go on.
        host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=device.type == "cuda")
        host.copy_(vector, non_blocking=True)
        event = torch.Event(device)
        event.record()
        return cls(host, event)

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Floats:
        """The numbers, in float64. The one place that waits for a device."""
        if self._event is not None:
            self._event.synchronize()
        host = self._host
        # A loss of autocast may be one; numpy has no such type.
        if host.dtype is torch.bfloat16:
            host = host.float()
        return host.numpy().astype(np.float64)
