"""The factor by which a GradScaler has multiplied the loss."""

import torch
from torch import Tensor

from gradsight.measure.host_copy import HostCopy


def loss_scale(scaler: torch.amp.GradScaler | None) -> HostCopy | None:
    """The scaler's factor at this moment, without waiting for it; None without a scaler."""
    if scaler is None:
        return None
    # Not get_scale(): it reads the number on the host, and so waits for the device.
    factor = getattr(scaler, "_scale", None)
    if isinstance(factor, Tensor):
        return HostCopy.of(factor.detach().clone().view(1))
    return HostCopy.of(torch.tensor([scaler.get_scale()], device="cpu"))
