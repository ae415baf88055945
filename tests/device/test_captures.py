"""Graphs: a capture is left alone, and what its replays hide is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from device.clock import Speed
from device.simulated import capturing, simulated
from device.tensors import moved, peek, replay
from gradsight.session.captures import CAPTURED_STEP

WARM, REPLAYED = 3, 4


def train(speed: Speed, run_dir: Path, whole: bool, warm: int = WARM) -> list[float]:
    """Some ordinary steps, a capture, and replays; the true norms of the replayed steps."""
    true = []
    with simulated(speed) as there:
        torch.manual_seed(0)
        model = moved(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), there.device)
        options: Any = {"capturable": True, "foreach": True}
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, **options)
        data = torch.randn(warm + REPLAYED, 8, 4)
        static = torch.zeros(8, 4, device=there.device)
        with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True) as watched:

            def passes() -> torch.Tensor:
                optimizer.zero_grad(set_to_none=False)
                loss = model(static).pow(2).mean()
                loss.backward()
                if whole:
                    optimizer.step()
                return loss

            for batch in data[:warm]:
                static.copy_(batch)
                passes()
                if not whole:
                    optimizer.step()
            with capturing() as graph:
                loss = passes()
            for batch in data[warm:]:
                static.copy_(batch)
                replay(graph)
                squares = [peek(each.grad).square().sum() for each in model.parameters()]
                true.append(float(torch.stack(squares).sum().sqrt()))
                if not whole:
                    optimizer.step()
                    watched.log(loss=loss)
    return true


@pytest.mark.parametrize("speed", ["slow", "fast"])
def test_an_optimizer_outside_of_the_graph_is_seen_at_every_step(
    speed: Speed, tmp_path: Path
) -> None:
    true = train(speed, tmp_path, whole=False)
    run = gradsight.open_run(tmp_path)
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(WARM + REPLAYED))
    assert [step.total_norm for step in steps[WARM:]] == pytest.approx(true, rel=1e-5)
    assert len({step.loss for step in steps[WARM:]}) == REPLAYED
    assert [problem.message for problem in run.problems()] == []


@pytest.mark.parametrize("warm", [0, WARM])
def test_of_a_whole_step_in_the_graph_nothing_is_recorded_and_that_is_said(
    warm: int, tmp_path: Path
) -> None:
    with pytest.warns(gradsight.errors.GradsightWarning, match="captured in a graph"):
        train("slow", tmp_path, whole=True, warm=warm)
    run = gradsight.open_run(tmp_path)
    assert [step.step for step in run.steps()] == list(range(warm))
    assert [problem.message for problem in run.problems()] == [CAPTURED_STEP]
