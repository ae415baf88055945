"""What the optimizer used, divided by the gradient: measured on a sample of the entries, without
waiting for the device.
"""

import torch
from torch import Tensor

from gradsight.core.shards import local_part

ENTRIES = 64
"""How many entries of each gradient are looked at."""


class ClipMeter:
    """Compares the gradients after backward with those that reach the optimizer."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []
        self._scale: Tensor | None = None

    def after_backward(self, parameters: list[Tensor], scale: Tensor | None) -> None:
        """Remember the gradients as backward left them, and the loss scale they carry."""
        self._before = [(p, _head(p.grad).clone()) for p in parameters if p.grad is not None]
        self._scale = scale

    def at_step(self, fused: bool) -> Tensor | None:
        """The factor between the two; NaN where there is not one factor for all; None where nothing
        was seen.
        """
        pairs = [(b, _head(p.grad)) for p, b in self._before if p.grad is not None]
        self._before = []
        if not pairs or (fused and self._scale is not None):
            return None
        wide = torch.promote_types(torch.float32, pairs[0][0].dtype)
        device = pairs[0][0].device
        before, after = (torch.cat([pair[i].to(device, wide) for pair in pairs]) for i in (0, 1))
        if self._scale is not None:
            before = before / self._scale.to(before)
        factor = torch.dot(after, before) / torch.dot(before, before)
        rest = (after - factor * before).norm()
        return torch.where(rest <= 1e-3 * after.norm(), factor, torch.full_like(factor, torch.nan))


def _head(grad: Tensor) -> Tensor:
    return local_part(grad.detach()).reshape(-1)[:ENTRIES]
