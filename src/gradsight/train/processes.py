"""The trainer's process among those that train together."""

import os

import torch
from torch import Tensor

from gradsight.core.group import ProcessGroup, is_distributed, join_training, leave_training
from gradsight.errors import UsageError


def pick_device(wanted: str) -> torch.device:
    """The device of this process."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: this torch sees no GPU. Use --device cpu, or install a CUDA build of "
            "torch"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    if local >= gpus:
        raise UsageError(
            f"{local + 1} processes on this machine, but only {gpus} GPUs: start fewer"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


class Processes:
    """This process among all, as torchrun or our own launcher started them.

    Losses are exchanged on the device; decisions on the CPU, so that no GPU has to be waited for.
    """

    def __init__(self, device: str = "auto") -> None:
        self.device = pick_device(device)
        self._joined_here = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not is_distributed()
        if self._joined_here:
            join_training("nccl" if self.device.type == "cuda" else "gloo")
        self._control = ProcessGroup("trainer", timeout=None)
        self._losses = self._control
        if self.device.type != "cpu":
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
