"""DistributedDataParallel on the device: one process, whose reducer writes the gradients."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsight
from device.clock import Speed
from device.simulated import simulated
from device.tensors import THE_DEVICE, moved, peek

STEPS, STEADY = 9, 5


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(device: torch.device, run_dir: Path | None) -> tuple[list[Tensor], int]:
    """The weights after some steps, and how often a steady one drained the device."""
    torch.manual_seed(0)
    inner = moved(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), device)
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    batches = torch.randn(STEPS, 8, 4).to(device).unbind()
    watched = None
    if run_dir is not None:
        watched = gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True)
    drains = 0
    for number, batch in enumerate(batches):
        THE_DEVICE.clock.take()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= STEADY:
            drains += sum(wait.drains for wait in THE_DEVICE.clock.take()[0])
    if watched is not None:
        watched.close()
    return [peek(parameter) for parameter in inner.parameters()], drains


@pytest.mark.parametrize("speed", ["slow", 40])
def test_norms_are_the_cpus_and_training_is_left_alone(
    speed: Speed, one_rank: None, tmp_path: Path
) -> None:
    train(torch.device("cpu"), tmp_path / "cpu")
    with simulated(speed) as there:
        weights, drains = train(there.device, tmp_path / "there")
        alone, _ = train(there.device, None)
    assert drains == 0
    assert all(map(torch.equal, weights, alone))
    run = gradsight.open_run(tmp_path / "there")
    right = [step.total_norm for step in gradsight.open_run(tmp_path / "cpu").steps()]
    assert [step.total_norm for step in run.steps()] == pytest.approx(right, rel=1e-3)
    assert {step.gradient for step in run.steps()} == {"true"}
    assert list(run.problems()) == []
