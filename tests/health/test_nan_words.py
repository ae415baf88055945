""" "grad_norm: nan. Is this normal?" The report answers in words."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsight
from gradsight.cli import main
from gradsight.values.health_report import HealthReport
from gradsight.values.scaling import scaler_note


def trained(
    run_dir: Path,
    loss_of: Callable[[nn.Module, int], Tensor],
    scale: float | None = None,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> HealthReport:
    torch.manual_seed(0)
    model = model or nn.Linear(4, 4)
    steps = optimizer(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with gradsight.watch(model, steps, run_dir=run_dir, quiet=True) as watched:
        for step in range(14):
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(steps)
            scaler.update()
            steps.zero_grad()
        return watched.report()


def ordinary(model: nn.Module, step: int) -> Tensor:
    return (10 * model(torch.randn(8, 4))).square().mean()


def test_a_scaler_that_finds_its_scale_is_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = trained(tmp_path, ordinary, scale=2.0**124)
    left_out = sum(step.skipped for step in gradsight.open_run(tmp_path).steps())
    assert 1 < left_out < 8
    words = "the loss scaler is finding its scale: no weight was changed, harmless until step"
    assert report.status == "healthy"
    assert report.notes == (f"{words} {left_out} ({left_out} left out)",)
    assert main(["report", str(tmp_path)]) == 0
    assert words in capsys.readouterr().out
    assert words[1:] in (tmp_path / "report.md").read_text()


def test_a_scaler_that_has_not_found_it_yet() -> None:
    assert "harmless until step 18 " in str(scaler_note([3, 10, 11, 12], 12, []))
    assert "harmless until step 13 " in str(scaler_note([3, 10, 11, 12], 13, []))
    assert scaler_note([], 13, []) is None


def test_nan_weights_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(model: nn.Module, step: int) -> Tensor:
        return ordinary(model, step) * (float("nan") if step == 5 else 1.0)

    report = trained(tmp_path, broken)
    assert "the weights are NaN since step 5" in report.findings[0].evidence
    assert main(["report", str(tmp_path)]) == 2
    assert "the weights are NaN since step 5" in " ".join(capsys.readouterr().out.split())
    assert "the weights are NaN since step 5" in (tmp_path / "report.md").read_text()


def test_weights_that_were_nan_before_their_gradient_was(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    made = []

    def spoil(*_: object) -> None:
        made.append(1)
        if len(made) == 7:
            with torch.no_grad():
                model.weight[0, 0] = float("nan")

    def spoiling(parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr)
        optimizer.register_step_post_hook(spoil)
        return optimizer

    report = trained(tmp_path, ordinary, model=model, optimizer=spoiling)
    assert [(each.code, each.first_step) for each in report.findings] == [("GS103", 7)]
    assert "the weights are NaN since step 6" in report.findings[0].evidence


def test_a_gradient_that_was_mended_leaves_the_weights_alone(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)

    def mend(*_: object) -> None:
        for parameter in model.parameters():
            parameter.grad.nan_to_num_()  # type: ignore[union-attr]

    def mending(parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr)
        optimizer.register_step_pre_hook(mend)
        return optimizer

    def broken(model: nn.Module, step: int) -> Tensor:
        return ordinary(model, step) * (float("nan") if step == 5 else 1.0)

    report = trained(tmp_path, broken, model=model, optimizer=mending)
    assert [each.code for each in report.findings] == ["GS103"]
    assert not any("weights are" in each.evidence for each in report.findings)


def test_an_eps_that_float16_does_not_know_is_named(tmp_path: Path) -> None:
    def small(model: nn.Module, step: int) -> Tensor:
        return model(torch.randn(8, 4).half()).float().square().mean() * 1e-3

    report = trained(tmp_path, small, model=nn.Linear(4, 4).half(), optimizer=torch.optim.Adam)
    finding = next(each for each in report.findings if each.code in ("GS103", "GS104"))
    assert "eps, 1e-08, is 0 in float16" in finding.evidence
    assert "eps" in finding.recommendation
    assert finding.caused_by is None
