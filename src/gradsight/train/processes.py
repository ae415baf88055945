"""The trainer's process among those that train together."""

import os

from torch import Tensor

from gradsight.core.devices import backend_of, is_accelerator, pick_device
from gradsight.core.group import ProcessGroup, is_distributed, join_training, leave_training


class Processes:
    """This process among all, as torchrun or our own launcher started them.

    Losses are exchanged on the device; decisions on the CPU, so that no GPU has to be waited for.
    """

    def __init__(self, device: str = "auto") -> None:
        self.device = pick_device(device)
        self._joined_here = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not is_distributed()
        if self._joined_here:
            join_training(backend_of(self.device))
        self._control = ProcessGroup("trainer", timeout=None)
        self._losses = self._control
        if is_accelerator(self.device):
            # Training's own group: a second one would hold its buffers on the GPU a second time.
            self._losses = ProcessGroup(device=self.device, own=False)
        self.world = self._control.size
        self.rank = self._control.rank

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self._control.is_first

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes."""
        return self.sum(value) / self.world

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._losses.sum(value)

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return self._control.any(flag)

    def gather(self, value: Tensor) -> list[Tensor] | None:
        """Every process's tensor on the first one, None on the others."""
        return self._control.gather_objects(value)

    def from_first(self, text: str) -> str:
        """The first process's text, on all."""
        return self._control.from_first(text)

    def wait(self) -> None:
        """Go on when all have come here."""
        self._control.barrier()

    def close(self) -> None:
        """Leave the group, if it was joined here."""
        self._control.close()
        if self._joined_here:
            leave_training()
