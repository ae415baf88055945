"""Numbers on their way from the device to the host, without anybody waiting for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsight.core.devices import host_memory, is_accelerator, record_event
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
    is_from_device: bool = False
    """Whether it has, or had, a way to go."""

    @classmethod
    def of(cls, vector: Tensor) -> "HostCopy":
        """Start copying this vector, which nobody may write to any more."""
        vector = local_part(vector)
        device = vector.device
        if not is_accelerator(device):
            return cls(vector)
        # Only a copy into pinned memory leaves the host free to go on.
        host = host_memory(vector.shape, vector.dtype, device)
        host.copy_(vector, non_blocking=True)
        try:
            event = record_event(device)
        except (RuntimeError, NotImplementedError):  # a kind that has no events: wait at once
            host.copy_(vector)
            return cls(host, None, is_from_device=True)
        return cls(host, event, is_from_device=True)

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Floats:
        """The numbers, in float64. The one place that waits for a device."""
        if self._event is not None:
            self._event.synchronize()
        numbers: Floats = self._host.double().numpy()
        return numbers

    def number(self) -> float:
        """The first number."""
        return float(self.read().reshape(-1)[0])


def loss_scale(scaler: torch.amp.GradScaler | None) -> HostCopy | None:
    """The scaler's factor at this moment, without waiting for it; None without a scaler."""
    if scaler is None:
        return None
    # Not get_scale(): it reads the number on the host, and so waits for the device.
    factor = getattr(scaler, "_scale", None)
    if isinstance(factor, Tensor):
        return HostCopy.of(factor.detach().clone().view(1))
    return HostCopy.of(torch.tensor([scaler.get_scale()], device="cpu"))
