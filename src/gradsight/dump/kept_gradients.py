"""The gradient of the last step on its device, until that step is judged.

On an accelerator a step is judged when its gradient is gone. So it is copied when it is true: one
more volume of gradients, one copy per look.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradsight.core.devices import accelerators, free_bytes
from gradsight.core.notices import notice
from gradsight.errors import UsageError
from gradsight.measure.host_copy import HostCopy
from gradsight.values.sizes import format_size


class KeptGradients:
    """Copies of all gradients of one step, in memory that is kept from step to step."""

    def __init__(self, parameters: Sequence[Tensor], quiet: bool) -> None:
        """Refuses to begin where there is no room for them."""
        self._parameters = [each for each in parameters if each.requires_grad]
        self._copies: dict[int, Tensor] = {}
        self._held: list[int] = []
        self.step: int | None = None
        """The step whose gradient it holds."""
        self.scale: HostCopy | None = None
        """The loss scale that it carries."""
        size = sum(each.nbytes for each in self._parameters)
        _refuse_without_room(self._parameters, size)
        if not quiet:
            notice(
                f"dump_on keeps a copy of the gradient until its step is judged: "
                f"{format_size(size)} on the device"
            )

    @torch.no_grad()
    def keep(self, step: int, scale: HostCopy | None) -> None:
        """Copy the gradients that are in place now; they are true."""
        self._held = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            self._held.append(place)
            known = self._copies.get(place)
            if known is None or known.layout != gradient.layout or not _is_plain(gradient):
                self._copies[place] = gradient.detach().clone()
            else:
                targets.append(known)
                sources.append(gradient.detach())
        if targets:
            torch._foreach_copy_(targets, sources)
        self.step = step
        self.scale = scale

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In here the parameters' gradients are the copies."""
        before = [parameter.grad for parameter in self._parameters]
        try:
            for place, parameter in enumerate(self._parameters):
                parameter.grad = self._copies[place] if place in self._held else None
            yield
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient


def _is_plain(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided


def _refuse_without_room(parameters: Sequence[Tensor], size: int) -> None:
    for device in accelerators(parameters):
        needed = sum(each.nbytes for each in parameters if each.device == device)
        free = free_bytes(device)
        if free is not None and needed > free:
            raise UsageError(
                f"dump_on keeps a copy of the gradient on the device until its step is judged: "
                f"{format_size(size)}, and {format_size(free)} are free on {device}. Leave dump_on "
                "out and dump by schedule, or train a smaller batch"
            )
