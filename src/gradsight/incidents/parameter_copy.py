"""The trained parameters as they were before the last update, where a bad step is known too late.

On an accelerator a step is seen to be bad when the optimizer has used its gradient. What is run
again then must run on the weights of that step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradsight.core.devices import free_bytes, host_memory, is_accelerator, record_event
from gradsight.core.notices import notice
from gradsight.core.problems import Problems
from gradsight.core.shards import local_part
from gradsight.values.sizes import format_size

_AFTER = 2
"""Steps after which all that training needs has been asked for."""
_SHARE = 0.5
"""Of what is free then, the copy may take this much."""


class ParameterCopy:
    """A second set of the trained parameters on their device, or in pinned memory of the host."""

    def __init__(self, parameters: Sequence[Tensor], problems: Problems, quiet: bool) -> None:
        self._parameters = [
            local_part(each)
            for each in parameters
            if each.requires_grad and is_accelerator(each.device)
        ]
        self._problems = problems
        self._copies: list[Tensor] | None = None
        self._events: list[torch.Event] = []
        self._steps = 0
        self._left_out = not self._parameters
        self.step: int | None = None
        """The step whose weights it holds."""
        if self._parameters and not quiet:
            size = format_size(self.bytes)
            notice(
                f'recorder="batch" keeps a copy of the trained parameters: {size} on the device, '
                "one copy per step"
            )

    @property
    def bytes(self) -> int:
        """What a copy takes."""
        return sum(each.nbytes for each in self._parameters)

    def take(self, step: int) -> None:
        """The optimizer is about to change the parameters."""
        if self._left_out or step == self.step:
            return
        self._steps += 1
        if self._steps <= _AFTER:
            return
        if self._copies is None:
            self._copies = self._make()
        if self._copies is None:
            self._left_out = True
            return
        with torch.no_grad():
            if is_accelerator(self._copies[0].device):
                torch._foreach_copy_(self._copies, [each.data for each in self._parameters])
            else:
                for copy, each in zip(self._copies, self._parameters, strict=True):
                    copy.copy_(each.data, non_blocking=True)
                devices = dict.fromkeys(each.device for each in self._parameters)
                self._events = [record_event(device) for device in devices]
        self.step = step

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """In here the parameters are those of the copy; what they were is put back."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for event in self._events:
            event.synchronize()
        self._events = []
        with torch.no_grad():
            # One by one: a third set of all parameters may not fit.
            for copy, parameter in zip(self._copies or (), self._parameters, strict=True):
                kept = parameter.data.clone()
                parameter.data.copy_(copy)
                copy.copy_(kept)

    def _make(self) -> list[Tensor] | None:
        """Memory for the copy: on the device where there is room, else on the host."""
        try:
            if self._fits():
                return [torch.empty_like(each.data) for each in self._parameters]
        except RuntimeError:  # no room after all
            pass
        try:
            return [host_memory(each.shape, each.dtype, each.device) for each in self._parameters]
        except (RuntimeError, MemoryError):
            self._problems.report(
                "parameter-copy",
                f'there is no room for the copy of the parameters that recorder="batch" keeps '
                f"({format_size(self.bytes)}): a step whose gradient breaks in backward is not run "
                "again",
            )
            return None

    def _fits(self) -> bool:
        needed: dict[torch.device, int] = {}
        for each in self._parameters:
            needed[each.device] = needed.get(each.device, 0) + each.nbytes
        for device, size in needed.items():
            free = free_bytes(device)
            # A device that does not tell says so itself when it is asked for too much.
            if free is not None and size > _SHARE * free:
                return False
        return True
