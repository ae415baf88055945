"""The peak of a training step, predicted on fake tensors: nothing is computed, no GPU is needed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.errors import UsageError
from gradsight.memory.apply import apply_checkpointing
from gradsight.memory.blocks import blocks_meant
from gradsight.memory.called_blocks import blocks_of
from gradsight.memory.counter import StorageCounter
from gradsight.memory.cuda import GRANULE, UNKNOWN, cuda_operators
from gradsight.memory.fake import data_dependence_refused, fake_tensors, sequences_not_packed
from gradsight.memory.leftovers import without_leftovers
from gradsight.memory.peak import memory_use, scratch_notes
from gradsight.memory.workload import Build, backward, call_build, make_optimizer, warm_up
from gradsight.values.memory import CheckpointingPlan, MemoryUse

DEVICES = ("cpu", "cuda")
LARGEST_SIZE = 1 << 20
"""Where the search for a batch size ends."""


@without_leftovers
def predict_peak_memory(
    build: Build,
    *,
    policy: str | CheckpointingPlan | None = None,
    optimizer: str | None = "adamw",
    device: str = "cpu",
    blocks: Sequence[str] | None = None,
) -> MemoryUse:
    """The peak of a training step with the optimizer's state in place, as in all but the first.

    No data is computed.

    build: makes (model, batch) or (model, batch, loss_fn), as in the README.
    policy: what is checkpointed, as in `apply_checkpointing`; None is nothing.
    optimizer: its name, for the state that it keeps; None is forward and backward only.
    device: "cuda" predicts what CUDA's operators keep, and the notes say what cannot be known; no
      GPU is needed, also where build() puts the model on CUDA.
    blocks: the modules that count as blocks, by name or shell pattern; None finds them.
    """
    refuse_unknown_torch("memory")
    if policy is None and blocks is not None:
        raise UsageError(
            "blocks are those that a policy recomputes, and policy=None recomputes nothing: give "
            "for example policy='full', or leave blocks out"
        )
    with fake_device(device):
        workload = call_build(build)
        if policy is not None:
            meant = blocks_of(workload, blocks_meant(policy, blocks))
            apply_checkpointing(workload.model, policy, blocks=meant)
        made_optimizer = make_optimizer(optimizer, workload.model, device=device)
        warm_up(made_optimizer)
        counter = StorageCounter(granule_of(device))
        with sequences_not_packed(), counter:
            backward(workload)
            if made_optimizer is not None:
                made_optimizer.step()
    notes = scratch_notes(counter, device=device)
    if device == "cuda":
        notes = (*UNKNOWN, *notes)
    return memory_use(counter, device=device, predicted=True, notes=notes)


@contextmanager
def fake_device(device: str) -> Iterator[None]:
    """Inside, a step runs on fake tensors with the device's own operators.

    A model whose shapes or branches depend on values is refused with a clear error.
    """
    if device not in DEVICES:
        raise UsageError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        if device == "cuda":
            stack.enter_context(cuda_operators())
        stack.enter_context(data_dependence_refused())
        yield


def granule_of(device: str) -> int:
    """The size to whose multiples the device's allocator rounds up."""
    return GRANULE if device == "cuda" else 1


@without_leftovers
def count_parameters(build: Build) -> int:
    """The number of parameters of a model that is never filled."""
    with fake_tensors():
        model = call_build(build).model
        return sum(parameter.numel() for parameter in model.parameters())


def largest_batch(
    build_for: Callable[[int], Build],
    memory: int,
    *,
    policy: str | CheckpointingPlan | None = None,
    optimizer: str | None = "adamw",
    device: str = "cpu",
) -> int:
    """The largest batch size whose predicted peak is at most `memory` bytes; 0: none fits."""

    def peak(size: int) -> int:
        build = build_for(size)
        use = predict_peak_memory(build, policy=policy, optimizer=optimizer, device=device)
        return use.peak_bytes

    return largest(peak, memory)


def largest(peak: Callable[[int], int], memory: int) -> int:
    """The largest size whose peak fits, for a peak that grows with the size, in few calls of it.

    The peak is a maximum of straight lines, so the line through two known points is a good guess at
    the next one.

    >>> largest(lambda size: max(500, 100 + 7 * size), 1000)
    128
    """
    if memory < 1:
        raise UsageError(f"memory must be above zero, got {memory}")
    known: dict[int, int] = {}
    fits = 0
    too_large = LARGEST_SIZE
    size = 1
    while too_large - fits > 1:
        known[size] = peak(size)
        if known[size] <= memory:
            fits = size
        else:
            too_large = size
        size = min(max(_guess(known, memory, fits), fits + 1), too_large - 1)
    return fits


def _guess(known: dict[int, int], memory: int, fits: int) -> int:
    """Where a line through two known points meets the limit.

    The points are those around the limit, or the two last ones below it.
    """
    above = [size for size in sorted(known) if known[size] > memory]
    below = [size for size in sorted(known) if known[size] <= memory]
    points = (below[-1:] + above[:1]) if above and below else below[-2:]
    if len(points) < 2 or known[points[1]] == known[points[0]]:
        return 8 * fits  # as long as something else than the batch makes the peak
    first, second = points
    return first + (memory - known[first]) * (second - first) // (known[second] - known[first])
