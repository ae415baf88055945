"""The measured peak of a training step, for predictions to be compared with."""

from collections.abc import Callable
from typing import Any

from gradsight import apply_checkpointing, measure_peak_memory
from gradsight.memory.workload import as_workload, backward, make_optimizer, warm_up


def measured(
    build: Callable[[], Any], policy: str | None = None, optimizer: str | None = "adamw"
) -> int:
    """Return the peak of a real step that finds the optimizer's state in place."""
    workload = as_workload(build())
    if policy is not None:
        apply_checkpointing(workload.model, policy)
    made = make_optimizer(optimizer, workload.model)
    warm_up(made)

    def step() -> None:
        backward(workload)
        if made is not None:
            made.step()

    return measure_peak_memory(step).peak_bytes
