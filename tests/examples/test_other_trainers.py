"""The integrations in examples/other_trainers, with stand-ins; run.sh there has the real trainers."""

import copy
import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsight
from examples.stand_ins import (
    OVERRIDES,
    MetricsProcessor,
    OlmoTrainer,
    TitanTrainer,
    put_olmo_core,
    put_torchtitan,
)
from integrations.tiny import Truth, are_equal, truth, weights

Steps = list[list[tuple[Tensor, Tensor]]]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))


def batches() -> Steps:
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator))] * 2
        for _ in range(4)
    ]


def check_steps(run_dir: Path, expected: dict[int, Truth]) -> None:
    run = gradsight.open_run(run_dir)
    steps = {step.step: step for step in run.steps()}
    assert set(steps) == set(expected)
    for number, step in steps.items():
        assert step.gradient == "true"
        assert step.lr == 0.1
        assert step.loss == pytest.approx(expected[number].loss, rel=1e-5)
        assert step.total_norm == pytest.approx(expected[number].norm, rel=1e-5)
        assert step.clip_coef == pytest.approx(0.1 / expected[number].norm, rel=1e-4)
    assert not list(run.problems())
    # Every parameter is held by two optimizers of torchtitan's, on purpose.
    assert "GS303" not in {finding.code for finding in run.findings()}


def plain_loop(
    steps: Steps, skipped: tuple[int, ...] = ()
) -> tuple[dict[int, Truth], list[Tensor]]:
    """What a float64 loop says of every step; and the weights that plain training ends with."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for number, micro_batches in enumerate(steps):
        if number in skipped:
            continue
        found[number] = truth(model, lambda twin, all=micro_batches: loss_of(twin, all))
        for batch in micro_batches:
            (loss_of(model, [batch]) / len(micro_batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return found, weights(model)


def loss_of(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    kind = next(model.parameters()).dtype
    losses = [(model(x.to(kind)) - y.to(kind)).square().mean() for x, y in micro_batches]
    return torch.stack(losses).mean()


def test_torchtitan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_torchtitan(monkeypatch)
    importlib.import_module("gradsight_torchtitan")
    target, watched = OVERRIDES["gradsight_torchtitan.watched"]
    assert target is MetricsProcessor.Config
    config = watched(MetricsProcessor.Config(log_freq=3), quiet=True)
    assert config.log_freq == 3
    expected, _ = plain_loop(batches())
    model = made()
    trainer = TitanTrainer(model, config, str(tmp_path))
    told = [trainer.train_step(step) for step in batches()]
    trainer.close()
    assert trainer.metrics_processor.closed
    assert told == pytest.approx([each.loss for each in expected.values()], rel=1e-5)
    check_steps(tmp_path / "gradsight", expected)


def test_torchtitan_is_not_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_torchtitan(monkeypatch)
    titan = importlib.import_module("gradsight_torchtitan")
    trained = []
    for switch in ("0", "1"):
        monkeypatch.setenv("GRADSIGHT", switch)
        model = made()
        config = titan.watched(MetricsProcessor.Config(), str(tmp_path / switch), quiet=True)
        trainer = TitanTrainer(model, config, str(tmp_path))
        for step in batches():
            trainer.train_step(step)
        trainer.close()
        trained.append(weights(model))
    assert are_equal(*trained)
    assert not (tmp_path / "0").exists()
    assert (tmp_path / "1" / "run.sqlite").exists()


def test_olmo_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_olmo_core(monkeypatch)
    door = importlib.import_module("gradsight_olmo_core")
    expected, plain = plain_loop(batches(), skipped=(2,))
    model = made()
    callback = door.GradsightCallback(options={"quiet": True})
    OlmoTrainer(model, str(tmp_path), callback).fit(batches(), skipped=(3,))
    assert are_equal(weights(model), plain)
    check_steps(tmp_path / "gradsight", expected)


def test_olmo_core_stops_and_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_olmo_core(monkeypatch)
    door = importlib.import_module("gradsight_olmo_core")
    broken = copy.deepcopy(batches())
    broken[1][0][0][0, 0] = torch.nan
    options = {"quiet": True, "on_finding": {"GS103": "stop"}}
    trainer = OlmoTrainer(
        made(), str(tmp_path), door.GradsightCallback(str(tmp_path / "a"), options)
    )
    trainer.fit(broken)
    assert trainer.canceled is not None
    assert trainer.global_step == 2

    wrong = batches()
    wrong[2][0] = (torch.randn(6, 3), torch.randn(6, 1))
    callback = door.GradsightCallback(str(tmp_path / "b"), {"quiet": True})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        OlmoTrainer(made(), str(tmp_path), callback).fit(wrong)
    assert [step.step for step in gradsight.open_run(tmp_path / "b").steps()] == [0, 1]
