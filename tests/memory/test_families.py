"""Model families that were once refused: trained the same, with all that their own switch saves."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gradsight import apply_checkpointing, measure_peak_memory
from memory import families
from memory.measured_step import model_and_backward

WITHOUT_A_SWITCH = "albert with a mask"
FIRST_TIER = ("bart", "mixtral", "swin")
NOT_REENTRANT = {"use_reentrant": False}


def seed_everything() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def step(
    build: Callable[[], Any], change: Callable[[Any], object]
) -> tuple[dict[str, torch.Tensor | None], Any]:
    """The gradients of a step of the changed model, and the memory that it took."""
    seed_everything()
    model, backward = model_and_backward(build())
    change(model)
    seed_everything()
    use = measure_peak_memory(backward)
    return {name: p.grad for name, p in model.named_parameters()}, use


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
        assert [n for n in plain if not same(plain[n], gradients[n])] == [], policy
    assert checkpointed["full"].peak_bytes < checkpointed["selective"].peak_bytes < use.peak_bytes
    assert checkpointed["selective"].flops == use.flops < checkpointed["full"].flops
    if name != WITHOUT_A_SWITCH:
        _, theirs = step(build, lambda model: model.gradient_checkpointing_enable(NOT_REENTRANT))
        assert checkpointed["full"].peak_bytes <= theirs.peak_bytes < use.peak_bytes
