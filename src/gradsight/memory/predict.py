"""The peak of a training step, predicted on fake tensors: nothing is computed, and nothing needs a
GPU.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from gradsight.errors import UsageError
from gradsight.memory.apply import apply_checkpointing
from gradsight.memory.counter import StorageCounter
from gradsight.memory.cuda import GRANULE, UNKNOWN, cuda_operators
from gradsight.memory.fake import data_dependence_refused, fake_tensors, sequences_not_packed
from gradsight.memory.peak import memory_use, scratch_notes
from gradsight.memory.workload import Build, backward, call_build, make_optimizer, warm_up
from gradsight.values.memory import CheckpointingPlan, MemoryUse

DEVICES = ("cpu", "cuda")


def predict_peak_memory(
    build: Build,
    *,
    policy: str | CheckpointingPlan | None = None,
    optimizer: str | None = "adamw",
    device: str = "cpu",
    blocks: Sequence[str] | None = None,
) -> MemoryUse:
    """The peak of a training step, as every step but the first has it: with the optimizer's state
    in place.

    `optimizer=None` is forward and backward only. `device="cuda"` predicts what CUDA's operators keep, and its notes
    say what cannot be known; no GPU is needed, also where build() puts the model on CUDA.
    """
    if device not in DEVICES:
        raise UsageError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    counter = StorageCounter(GRANULE if device == "cuda" else 1)
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        if device == "cuda":
            stack.enter_context(cuda_operators())
        stack.enter_context(data_dependence_refused())
        _step(build, policy, optimizer, device, blocks, counter)
    notes = (*(UNKNOWN if device == "cuda" else ()), *scratch_notes(counter, device=device))
    return memory_use(counter, device=device, predicted=True, notes=notes)


def _step(
    build: Build,
    policy: str | CheckpointingPlan | None,
    optimizer: str | None,
    device: str,
    blocks: Sequence[str] | None,
    counter: StorageCounter,
) -> None:
    """Build, apply and run one step under the counter."""
    workload = call_build(build)
    if policy is not None:
        apply_checkpointing(workload.model, policy, blocks=blocks)
    made = make_optimizer(optimizer, workload.model, device=device)
    warm_up(made)
    with sequences_not_packed(), counter:
        backward(workload)
        if made is not None:
            made.step()
