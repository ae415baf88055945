# mypy: allow-untyped-calls
"""The peak of live tensor bytes of any piece of work, split by what the bytes were for."""

from collections.abc import Callable
from typing import Any

import torch

from gradsight.errors import UsageError
from gradsight.memory.allocations import allocator_peak
from gradsight.memory.counter import Allocation, StorageCounter
from gradsight.values.memory import MemoryUse

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "inputs")
SCRATCH = {
    "mkldnn_rnn_layer": "LSTM",
    "_cudnn_rnn": "LSTM or GRU",
    "convolution": "convolution",
    "mkldnn_convolution": "convolution",
}


def measure_peak_memory(fn: Callable[[], Any], *, operators: bool = False) -> MemoryUse:
    """Run fn once and give the exact peak of live tensor bytes.

    Tensors from before that fn uses (parameters, batch) count from the start. On the CPU this is
    what the tensors take; what an operator allocates and frees inside itself is seen only with
    `operators=True`, which runs torch's profiler beside the count and reports the difference as
    `operator_bytes`. Where fn works on a CUDA device, the peak is that of CUDA's allocator, and
    whatever it holds beyond the tensors seen is counted as temporaries.

    >>> import torch
    >>> measure_peak_memory(lambda: torch.zeros(250)).peak_bytes
    1000
    """
    if not callable(fn):
        raise UsageError(
            f"measure_peak_memory runs a function without arguments, got {type(fn).__name__}"
        )
    counter = StorageCounter()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    moved = _run(fn, counter, operators)
    if torch.cuda.is_available() and any(entry.device == "cuda" for entry in counter.log):
        return cuda_memory_use(counter, torch.cuda.max_memory_allocated())
    use = memory_use(counter)
    inside = None if moved is None else max(0, counter.at(-1) + moved - use.peak_bytes)
    return MemoryUse(
        use.peak_bytes,
        use.by_kind,
        flops=use.flops,
        operator_bytes=inside,
        notes=scratch_notes(counter, inside),
    )


def _run(fn: Callable[[], Any], counter: StorageCounter, operators: bool) -> int | None:
    """Run fn under the counter, and under the profiler where asked; its result does not outlive the
    count.
    """

    def counted() -> None:
        with counter:
            result = fn()
        del result

    if operators:
        return allocator_peak(counted)
    counted()
    return None


def memory_use(
    counter: StorageCounter,
    *,
    device: str = "cpu",
    predicted: bool = False,
    notes: tuple[str, ...] = (),
) -> MemoryUse:
    """What a counter has logged, as a value."""
    by_kind = kinds_at_peak(counter)
    return MemoryUse(sum(by_kind.values()), by_kind, device, predicted, counter.flops, notes=notes)


def cuda_memory_use(counter: StorageCounter, allocated: int) -> MemoryUse:
    """CUDA's own peak; what its allocator held beyond the tensors seen is added to the temporaries."""
    by_kind = kinds_at_peak(counter, device="cuda")
    beyond = allocated - sum(by_kind.values())
    by_kind["temporaries"] += beyond
    return MemoryUse(allocated, by_kind, "cuda", flops=counter.flops, operator_bytes=max(0, beyond))


def kinds_at_peak(counter: StorageCounter, device: str | None = None) -> dict[str, int]:
    """The bytes alive at the peak, by kind."""
    by_kind = dict.fromkeys(KINDS, 0)
    for entry in counter.log:
        if entry.alive_at(counter.peak_moment) and device in (None, entry.device):
            by_kind[kind_of(entry, counter.backward_starts)] += entry.size
    return by_kind


def kind_of(entry: Allocation, backward_starts: list[int]) -> str:
    """What a storage was for.

    What was seen in a parameter, its gradient or an optimizer's state is that; other storages from
    before are inputs. Activations are what the forward pass made and backward still found, and what
    recomputation made; everything else came and went.
    """
    if entry.kind is not None:
        return entry.kind
    if entry.born < 0:
        return "inputs"
    kept = any(entry.born < start and entry.alive_at(start) for start in backward_starts)
    if entry.phase == "recompute" or (entry.phase == "forward" and kept):
        return "activations"
    return "temporaries"


def scratch_notes(counter: StorageCounter, inside: int | None) -> tuple[str, ...]:
    """Names operators that are known to allocate inside themselves, where nobody looked."""
    names = sorted(
        {
            name
            for op, name in SCRATCH.items()
            if any(o.split(".")[0] == op for o in counter.operators)
        }
    )
    if inside is not None or not names:
        return ()
    inside_of = ", ".join(names)
    return (
        f"not in this number: what {inside_of} uses inside; measure_peak_memory(fn, operators=True) shows it",
    )
