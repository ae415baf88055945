"""The peak of a training step, predicted on fake tensors: nothing is computed, no GPU is needed."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from gradsight.core.torch_names import refuse_unknown_torch
from gradsight.errors import UsageError
from gradsight.memory.apply import apply_checkpointing
from gradsight.memory.assumed_values import ASSUMPTIONS, EVEN, ONE_EXPERT, ROUTING
from gradsight.memory.blocks import blocks_meant
from gradsight.memory.called_blocks import blocks_of
from gradsight.memory.counter import StorageCounter
from gradsight.memory.cuda import GRANULE, UNKNOWN, cuda_operators, is_cuda
from gradsight.memory.equal_parameters import step_fakes, warm_up_fakes
from gradsight.memory.fake import data_dependence_refused, fake_tensors
from gradsight.memory.known_values import KnownValues
from gradsight.memory.leftovers import without_leftovers
from gradsight.memory.peak import memory_use, scratch_notes
from gradsight.memory.ranks import bucket_bytes, group_of, shard, with_buckets
from gradsight.memory.real_branches import real_branches
from gradsight.memory.setting import ALONE, Ranks, StepSetting
from gradsight.memory.workload import Build, backward, call_build, make_optimizer
from gradsight.values.memory import CheckpointingPlan, MemoryUse

_TYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
LARGEST_SIZE = 1 << 20
"""Where the search for a batch size ends."""


def predict_peak_memory(
    build: Build,
    *,
    policy: str | CheckpointingPlan | None = None,
    optimizer: str | None = "adamw",
    device: str = "cpu",
    blocks: Sequence[str] | None = None,
) -> MemoryUse:
    """The peak of a training step with the optimizer's state in place, as in all but the first.

    No data is computed, except for small values that branches may depend on. Where one depends on
    what cannot be known, `assumptions` says what was assumed; `bounds` how much routing matters.

    build: makes (model, batch) or (model, batch, loss_fn), as in the README.
    policy: what is checkpointed, as in `apply_checkpointing`; None is nothing.
    optimizer: its name, for the state that it keeps; None is forward and backward only.
    device: "cuda" predicts what CUDA's operators keep, and the notes say what cannot be known; no
      GPU is needed, also where build() puts the model on CUDA.
    blocks: the modules that count as blocks, by name or shell pattern; None finds them.
    """
    return predict_step(build, StepSetting(policy, optimizer, device, blocks))


@without_leftovers
def predict_step(build: Build, setting: StepSetting) -> MemoryUse:
    """The peak of a training step on the fullest of its devices."""
    refuse_unknown_torch("memory")
    use, reasons = _one_case(build, setting, EVEN)
    bounds = None
    if ROUTING in reasons:
        skewed, _ = _one_case(build, setting, ONE_EXPERT)
        peaks = use.peak_bytes, skewed.peak_bytes
        if len(set(peaks)) == 1:
            reasons -= {ROUTING}  # the peak is the same either way
        else:
            bounds = (min(peaks), max(peaks))
    assumptions = tuple(text for reason, text in ASSUMPTIONS.items() if reason in reasons)
    return replace(use, assumptions=assumptions, bounds=bounds)


def _one_case(build: Build, setting: StepSetting, routing: str) -> tuple[MemoryUse, frozenset[str]]:
    """Return the peak under one routing of tokens, and the reasons for what was assumed."""
    device = setting.device
    with group_of(setting) as mesh, fake_device(device, routing) as values:
        workload = call_build(build)
        if setting.policy is not None:
            meant = blocks_of(workload, blocks_meant(setting.policy, setting.blocks))
            apply_checkpointing(workload.model, setting.policy, blocks=meant)
        with real_branches(values):
            shard(workload, setting, mesh)
            made_optimizer = make_optimizer(setting.optimizer, workload.model, device=device)
            values.paused = True
            warm_up_fakes(made_optimizer)
            values.paused = False
            counter = StorageCounter(granule_of(device))
            with counter:
                backward(workload)
                values.paused = True
                if made_optimizer is not None:
                    step_fakes(made_optimizer, counter)
                counter.mark_parameters(workload.model.parameters())
        buckets = bucket_bytes(workload.model, setting, granule_of(device))
    notes = scratch_notes(counter, device=device)
    if is_cuda(device):
        notes = (*UNKNOWN, *notes)
    use = memory_use(counter, device=device, predicted=True, notes=notes)
    return with_buckets(use, buckets), frozenset(values.read)


@contextmanager
def fake_device(device: str, routing: str = EVEN) -> Iterator[KnownValues]:
    """Inside, a step runs on fake tensors with the device's own operators.

    Small values that are known stand beside the fakes. A model whose shapes or branches depend on
    others is refused with a clear error, unless they can be assumed.
    """
    values = KnownValues(routing)
    with ExitStack() as stack:
        # Known random values are really drawn, and the user's own next draw must not notice.
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(fake_tensors())
        stack.enter_context(values)
        if is_cuda(device):
            stack.enter_context(cuda_operators())
        stack.enter_context(data_dependence_refused())
        yield values


def granule_of(device: str) -> int:
    """The size to whose multiples the device's allocator rounds up."""
    return GRANULE if is_cuda(device) else 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Parameters of a whole model, however many devices share them."""

    parameters: int
    trainable: int
    dtype: str
    """The type that most parameters have."""


@without_leftovers
def model_facts(build: Build) -> ModelFacts:
    """Count the parameters of a model that is never filled."""
    with fake_device("cpu"):
        parameters = list(call_build(build).model.parameters())
        counts: Counter[str] = Counter()
        for parameter in parameters:
            name = str(parameter.dtype).removeprefix("torch.")
            counts[_TYPE_NAMES.get(name, name)] += parameter.numel()
        trainable = [each.numel() for each in parameters if each.requires_grad]
    dtype = counts.most_common(1)[0][0] if counts else "fp32"
    return ModelFacts(sum(counts.values()), sum(trainable), dtype)


def largest_batch(
    build_for: Callable[[int], Build],
    memory: int,
    *,
    policy: str | CheckpointingPlan | None = None,
    optimizer: str | None = "adamw",
    device: str = "cpu",
    ranks: Ranks = ALONE,
) -> int:
    """The largest batch size whose predicted peak is at most `memory` bytes; 0: none fits."""
    setting = StepSetting(policy, optimizer, device, ranks=ranks)

    def peak(size: int) -> int:
        return predict_step(build_for(size), setting).peak_bytes

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
