"""Copies of gradients in reused host memory: all that the training thread has to wait for."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gradsight.core.devices import accelerators, host_memory, is_accelerator, record_event
from gradsight.dump.gradients import Gradients, Row

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Where a staged piece lies in its buffer."""

    row: Row
    start: int
    stop: int


class Buffer:
    """Host memory that is kept from dump to dump; pinned once they come from an accelerator."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._events: list[torch.Event] = []
        self._for_devices = False
        self._rows: tuple[Row, ...] = ()
        self._views: list[torch.Tensor] = []
        self.spans: list[Span] = []

    @torch.no_grad()
    def fill(self, gradients: Gradients) -> None:
        """Copy the gradients in; on an accelerator the copies are ordered, not awaited."""
        devices = accelerators(gradients.tensors)
        self._arrange(gradients.rows, devices)
        for target, tensor in zip(self._views, gradients.tensors, strict=True):
            target.copy_(_dense(tensor, target), non_blocking=is_accelerator(tensor.device))
        # One event per device says that all copies ordered before it have arrived.
        self._events = [record_event(device) for device in devices]

    def settle(self, divisor: float = 1.0) -> None:
        """Wait for the copies and divide out a loss scale; for the writer's thread."""
        for event in self._events:
            event.synchronize()
        if divisor != 1.0:
            with torch.no_grad():
                for span in self.spans:
                    self.view(span).div_(divisor)

    def view(self, span: Span) -> torch.Tensor:
        """A staged piece as a tensor."""
        dtype: torch.dtype = getattr(torch, span.row.dtype)
        return self._bytes[span.start : span.stop].view(dtype).view(span.row.place.sizes)

    def raw(self, span: Span) -> memoryview:
        """A staged piece as bytes, without a copy."""
        return self._bytes.numpy().data[span.start : span.stop]

    def _arrange(self, rows: tuple[Row, ...], devices: Sequence[torch.device]) -> None:
        """Find a place for each piece, unless they are those of the last time.

        Memory grows, and never shrinks.
        """
        needs_other_memory = bool(devices) and not self._for_devices
        if rows == self._rows and not needs_other_memory:
            return
        self.spans = _lay_out(rows)
        self._rows = ()
        length = self.spans[-1].stop if self.spans else 0
        if length > len(self._bytes) or needs_other_memory:
            # The old memory goes before the new is asked for: both together may not fit.
            self._views = []
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
            where = devices[0] if devices else torch.device("cpu")
            self._bytes = host_memory((length,), torch.uint8, where)
            self._for_devices = bool(devices)
        self._rows = rows
        self._views = [self.view(span) for span in self.spans]


class Pool:
    """A fixed number of buffers: the bound on how many dumps may be unfinished at a time."""

    def __init__(self, count: int) -> None:
        self._free = [Buffer() for _ in range(count)]
        self._lock = threading.Lock()
        self._until: float | None = None

    def take(self) -> Buffer | None:
        """A free buffer, if there is one."""
        with self._lock:
            if not self._free:
                return None
            return self._free.pop()

    @contextmanager
    def freed_by_ranks(self, patience: float) -> Iterator[None]:
        """In here buffers wait for other ranks, and nobody waits longer for a buffer than this.

        Those ranks may be waiting for the one that asks, in a collective of training's own.
        """
        self._until = time.monotonic() + patience
        try:
            yield
        finally:
            self._until = None

    @property
    def is_worth_waiting_for(self) -> bool:
        """Whether a buffer can be expected soon."""
        until = self._until
        return until is None or time.monotonic() < until

    def give(self, buffer: Buffer) -> None:
        """Return a buffer for the next dump."""
        with self._lock:
            self._free.append(buffer)


def _lay_out(rows: Sequence[Row]) -> list[Span]:
    """Lay the pieces out one after the other, each on a multiple that every dtype can live with."""
    spans, position = [], 0
    for row in rows:
        spans.append(Span(row, position, position + row.bytes))
        position += -(-row.bytes // ALIGN) * ALIGN
    return spans


def _dense(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sparse gradient as rows of zeros and values; others as they are."""
    if tensor.layout == torch.strided:
        return tensor
    dense = tensor.to_dense()
    return dense[: target.shape[0]] if target.dim() else dense
