# mypy: allow-untyped-calls
"""The peak of live tensor bytes of any piece of work, split by what the bytes were for."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch

from gradsight.core.devices import allocator_figures, has_gpu, reset_allocator_peak
from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.errors import UsageError
from gradsight.memory.collectives import BUCKETS, GATHERED
from gradsight.memory.compiled import EAGER_NOTE
from gradsight.memory.counter import Allocation, StorageCounter
from gradsight.memory.cuda import CUDA, is_cuda
from gradsight.memory.workload import refused_call
from gradsight.values.memory import MemoryUse

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
    "inputs",
    GATHERED,
    BUCKETS,
)
SCRATCH = {
    "mkldnn_rnn_layer": "LSTM",
    "_cudnn_rnn": "LSTM or GRU",
    "convolution": "convolution",
    "mkldnn_convolution": "convolution",
}
"""Operators that allocate inside themselves, and what a user calls them."""

# oneDNN computes products in bf16 from AVX512 on, and those in fp16 where the processor has
# instructions for them; it takes scratch (512 to 57,472 bytes in a step of a small GPT). On AVX2
# torch's own code computes them, without scratch.
PRODUCTS_WITH_SCRATCH = ("mm", "addmm", "bmm", "baddbmm")
TYPES_WITH_SCRATCH = (torch.bfloat16, torch.float16)


def measure_peak_memory(fn: Callable[[], object]) -> MemoryUse:
    """Run fn once and give the exact peak of live tensor bytes.

    Tensors from before that fn uses (parameters, batch) count from the start. On the CPU this is
    what the tensors take, the same on every processor. What an operator allocates and frees inside
    itself differs between processors and is not counted; use torch.profiler with
    profile_memory=True to see it. Where fn works on a CUDA device, the peak is that of CUDA's
    allocator, and whatever it holds beyond the tensors seen is counted as temporaries.

    fn: a function without arguments; it is run once.

    >>> import torch
    >>> measure_peak_memory(lambda: torch.zeros(250)).peak_bytes
    1000
    """
    refuse_unknown_torch("memory")
    expected = "measure_peak_memory runs a function without arguments"
    if not callable(fn):
        raise UsageError(f"{expected}, got {type(fn).__name__}")
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        raise UsageError(f"{expected}; a call of this generator or coroutine runs nothing of it")
    if refusal := refused_call(fn, 0):
        raise UsageError(f"{expected}: {refusal}. Write for example lambda: fn(batch)")
    counter = StorageCounter()
    reset_allocator_peak()
    with counter:
        result = fn()
    del result  # it does not outlive the count
    if has_gpu() and any(is_cuda(entry.device) for entry in counter.log):
        return cuda_memory_use(counter, int(allocator_figures()["max_allocated"]))
    use = memory_use(counter)
    return replace(use, notes=scratch_notes(counter))


def memory_use(
    counter: StorageCounter,
    *,
    device: str = "cpu",
    predicted: bool = False,
    notes: tuple[str, ...] = (),
) -> MemoryUse:
    """The counter's log as a value."""
    by_kind = kinds_at_peak(counter)
    return MemoryUse(sum(by_kind.values()), by_kind, device, predicted, counter.flops, notes=notes)


def cuda_memory_use(counter: StorageCounter, allocated: int) -> MemoryUse:
    """CUDA's own peak; what its allocator held beyond the tensors seen is among the temporaries."""
    by_kind = kinds_at_peak(counter, device=CUDA)
    beyond = allocated - sum(by_kind.values())
    by_kind["temporaries"] += beyond
    return MemoryUse(allocated, by_kind, CUDA, flops=counter.flops, operator_bytes=max(0, beyond))


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


def scratch_notes(counter: StorageCounter, *, device: str = "cpu") -> tuple[str, ...]:
    """Name the operators that may have used more inside themselves.

    Of a compiled model also that it ran eagerly.
    """
    names = {SCRATCH[name] for name, _ in counter.operators if name in SCRATCH}
    for name, result_type in counter.operators:
        if device == "cpu" and name in PRODUCTS_WITH_SCRATCH and result_type in TYPES_WITH_SCRATCH:
            names.add("products in 16 bits")
    if not names:
        return eager_notes(counter)
    inside_of = ", ".join(sorted(names))
    return (
        f"not in this number: what {inside_of} uses inside",
        *eager_notes(counter),
    )


def eager_notes(counter: StorageCounter) -> tuple[str, ...]:
    """Say so where compiled code ran, which runs eagerly under the count."""
    return (EAGER_NOTE,) if counter.ran_compiled else ()
