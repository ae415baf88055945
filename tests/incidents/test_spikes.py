"""The samples behind a spike, in every kind of loop: their norms are of the gradient as the record
knows it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from incidents.faults import linear, numbers

STEPS, BAD = 30, 25


def batch(step: int, number: int = 0) -> torch.Tensor:
    x = numbers(1000 * number + step, 8, 4)
    if step == BAD and number == 0:
        x[5] *= 300
    return x


def plain(model: nn.Module, optimizer: Any, watch: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()
    optimizer.step()


def scaled(model: nn.Module, optimizer: Any, watch: Any, step: int) -> None:
    scaler = model.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    scaler.scale(model(batch(step)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def clipped(model: nn.Module, optimizer: Any, watch: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, watch: Any, step: int) -> None:
    """The outlier comes first: its spike shows long before the step is complete."""
    for number in range(3):
        (model(batch(step, number)).square().mean() / 3).backward()
    optimizer.step()


def by_hand(model: nn.Module, optimizer: Any, watch: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()
    watch.step()
    optimizer.step()


@pytest.mark.parametrize("loop", [plain, scaled, clipped, accumulated, by_hand])
def test_the_outlier_holds_the_spike(loop: Any, tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    given = () if loop is by_hand else (optimizer,)
    with gradsight.watch(model, *given, run_dir=tmp_path) as watch:
        for step in range(STEPS):
            loop(model, optimizer, watch, step)
            optimizer.zero_grad()
    run = gradsight.open_run(tmp_path)
    (incident,) = run.incidents()
    assert (incident.step, incident.code) == (BAD, "GS201"), list(run.problems())
    assert incident.diagnosis is not None
    worst = incident.diagnosis.samples[0]
    assert (worst.micro_batch, worst.row) == (0, 5)
    assert worst.share is not None
    assert worst.share > 0.99
    total = {step.step: step.total_norm for step in run.steps()}[BAD]
    assert worst.norm == pytest.approx(total, rel=0.02)
    assert incident.diagnosis.micro_batches == (3 if loop is accumulated else 1)
    assert not list(run.problems())


def test_a_silenced_check_is_not_diagnosed(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    with gradsight.watch(model, optimizer, run_dir=tmp_path, health={"GS201": False}) as watch:
        for step in range(STEPS):
            plain(model, optimizer, watch, step)
            optimizer.zero_grad()
        assert watch._instruments.incidents is not None
        assert watch._instruments.incidents._incidents_seen == 0
    assert list(gradsight.open_run(tmp_path).incidents()) == []


def test_what_only_the_judge_sees_is_kept_and_says_that_it_was_late(tmp_path: Path) -> None:
    """One parameter jumps, the norm over all hardly does: known when the step is judged, not
    before.
    """

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.usual = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.small * x[:, 0] + self.usual * x[:, 1]

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    with gradsight.watch(model, optimizer, run_dir=tmp_path) as watch:
        for step in range(STEPS):
            x = torch.tensor([[5.0 if step == BAD else 0.01, 1.0]]) * (1 + step % 3 / 100)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (finding,) = [each for each in watch.report().findings if each.code == "GS201"]
    assert finding.parameters == ("small",)
    assert finding.diagnosis is not None
    assert finding.diagnosis.notes == (
        "the step was seen to be bad only after the optimizer had used its gradient: it was not run again",
    )
    assert finding.incident == f"incidents/step{BAD}-GS201"


def test_without_time_the_batch_is_still_that_of_the_bad_step(tmp_path: Path) -> None:
    """The parameters too: they were written before the optimizer used the gradient."""
    from gradsight.incidents.replay import replay

    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, run_dir=tmp_path, recorder="batch", diagnose_seconds=0):
        x = torch.randn(4, 4)
        x[3, 1] = float("nan")
        model(x).sum().backward()
        optimizer.step()
    (incident,) = gradsight.open_run(tmp_path).incidents()
    assert (incident.code, incident.diagnosis) == ("GS103", None)
    again = replay(Path(incident.path), linear(), 30, None)
    assert (again.reproduced, again.agrees) == (True, None)
    assert [sample.row for sample in again.diagnosis.samples] == [3]
