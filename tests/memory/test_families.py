"""Model families that were once refused: trained the same, with all that their own switch saves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradsight import apply_checkpointing, measure_peak_memory
from gradsight.memory.differences import identical, seed_everything
from gradsight.memory.workload import as_workload, backward
from memory import families

WITHOUT_A_SWITCH = "albert with a mask"
FIRST_TIER = ("bart", "mixtral", "swin")
NOT_REENTRANT = {"use_reentrant": False}


def step(
    build: Callable[[], Any], change: Callable[[Any], object]
) -> tuple[dict[str, torch.Tensor | None], Any]:
    """The gradients of a step of the changed model, and the memory that it took."""
    seed_everything()
    workload = as_workload(build())
    change(workload.model)
    seed_everything()
    use = measure_peak_memory(lambda: backward(workload))
    return {name: p.grad for name, p in workload.model.named_parameters()}, use


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST_TIER else pytest.mark.slow)
        for name in (*families.EXACT, "swin")
    ],
)
def test_gradients_are_the_same_and_savings_no_less(name: str) -> None:
    build = families.EXACT.get(name, families.swin)
    plain, use = step(build, lambda model: None)
    checkpointed = {}
    for policy in ("full", "selective"):
        gradients, checkpointed[policy] = step(
            build, lambda model, policy=policy: apply_checkpointing(model, policy)
        )
        assert [n for n in plain if not identical(plain[n], gradients[n])] == [], policy
    assert checkpointed["full"].peak_bytes < checkpointed["selective"].peak_bytes < use.peak_bytes
    assert checkpointed["selective"].flops == use.flops < checkpointed["full"].flops
    if name != WITHOUT_A_SWITCH:
        _, theirs = step(build, lambda model: model.gradient_checkpointing_enable(NOT_REENTRANT))
        assert checkpointed["full"].peak_bytes <= theirs.peak_bytes < use.peak_bytes
