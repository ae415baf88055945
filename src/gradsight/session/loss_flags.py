"""Whether the losses of a step were finite: known before the backward pass that follows is done.

The flag is on its way to the host before backward begins. So the optimizer's pre-hook of the same
step can wait for it while the device has the whole backward pass to do, and the weights are still
those of the step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsight.core import moments
from gradsight.core.devices import is_accelerator
from gradsight.core.guard import Guard
from gradsight.core.passes import BackwardPass
from gradsight.measure.host_copy import HostCopy


class LossFlags:
    """Listens for the backward passes of some parameters, where they are on an accelerator."""

    def __init__(self, parameters: Sequence[Tensor], guard: Guard) -> None:
        self._parameters = parameters
        self._guard = guard
        self._finite: Tensor | None = None
        """Whether all losses of the step were finite; on the device."""
        self._copy: HostCopy | None = None

    def start(self) -> None:
        """Begin to listen."""
        if any(is_accelerator(parameter.device) for parameter in self._parameters):
            moments.listen(self, self._guard, self._parameters)

    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass begins, of this model or of another."""
        tensors = begun.tensors
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        roots = [root for root in roots if isinstance(root, Tensor) and root.numel()]
        devices = {root.device for root in roots}
        # Losses on several devices would have to be brought together first.
        if len(devices) != 1 or not is_accelerator(roots[0].device):
            return
        with torch.no_grad():
            finite = torch.stack([torch.isfinite(root.detach()).all() for root in roots]).all()
            if self._finite is not None and self._finite.device == finite.device:
                finite = finite & self._finite
            # Adopted when the pass has turned out to be of this model.
            begun.notes[self] = (finite, HostCopy.of(finite.reshape(1)))

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """It has returned, and was of this model."""
        noted: tuple[Tensor, HostCopy] | None = begun.notes.pop(self, None)
        if noted is not None:
            self._finite = noted[0]
            self._copy = noted[1]

    def is_bad(self) -> bool:
        """Whether a loss of the step under way was not finite. Waits for the device, once."""
        copy = self._copy
        self._copy = None
        return copy is not None and not copy.number()

    def end_step(self) -> None:
        """The step is made."""
        self._finite = None
        self._copy = None
