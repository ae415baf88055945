"""Loops of the table are seen truly on the device, too, and left alone."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gradsight
from device.simulated import simulated
from device.tensors import brought_back, peek
from session import loops
from session.loops import Case
from session.test_true_gradient import compare, into, unwatched

LOOPS = [
    loops.accumulation,
    loops.checkpointed,
    loops.lbfgs,
    loops.scaler_fused,
    loops.sparse,
    loops.two_losses,
]
STEPS = 6


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_is_seen_truly_and_left_alone(
    loop: Callable[[Case], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "STEPS", STEPS)
    watched = run(loop, into(tmp_path))
    record = gradsight.open_run(tmp_path)
    steps = list(record.steps())
    assert [step.step for step in steps] == list(range(STEPS))
    assert {step.gradient for step in steps} == {"true"}
    compare(record, watched, 1e-5)
    alone = run(loop, unwatched)
    assert all(map(torch.equal, watched.weights, alone.weights)), "training was changed"


def run(
    loop: Callable[[Case], None], watch: Callable[..., contextlib.AbstractContextManager[None]]
) -> Case:
    with simulated(300) as there, there.device:
        case = Case(watch, device=there.device, on_cpu=brought_back)
        loop(case)
        case.weights = [peek(weight) for weight in case.weights]
        case.expected = [
            {name: peek(gradient) for name, gradient in step.items()} for step in case.expected
        ]
    return case
