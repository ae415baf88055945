"""Health of a watched run: what only a real loop shows, the report, the record, and the units that
are alive.
"""

import copy
import io
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradsight
from gradsight.cli import main
from gradsight.errors import UsageError
from gradsight.measure.units import UnitLife, exact_dead_share


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 6)
    return x, x[:, :3].argmax(1)


def train(steps: int = 30, clear: str = "none", micro: int = 1, **options: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, **options) as watched:
        for _ in range(steps):
            for _ in range(micro):
                x, y = batch()
                (F.cross_entropy(model(x), y) / micro).backward()
            optimizer.step()
            if clear == "none":
                optimizer.zero_grad()
            elif clear == "zero":
                optimizer.zero_grad(set_to_none=False)
            elif clear == "data":
                for parameter in model.parameters():
                    parameter.grad.data.zero_()
        return watched.report()


def codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings]


@pytest.mark.parametrize("clear", ["none", "zero", "data"])
@pytest.mark.parametrize("micro", [1, 3])
def test_clearing_in_any_way_is_fine(clear: str, micro: int) -> None:
    assert codes(train(clear=clear, micro=micro)) == []


def test_not_clearing_is_found() -> None:
    report = train(clear="never")
    assert codes(report) == ["GS305"]
    assert report.status == "critical"


def test_two_networks_in_turn_clear_their_gradients() -> None:
    torch.manual_seed(0)
    maker, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    first, second = (torch.optim.Adam(net.parameters(), lr=1e-3) for net in (maker, critic))
    with gradsight.watch(maker, first) as one, gradsight.watch(critic, second) as two:
        for _ in range(30):
            fake = maker(torch.randn(8, 4))
            second.zero_grad()
            (
                F.softplus(-critic(torch.randn(8, 2))).mean()
                + F.softplus(critic(fake.detach())).mean()
            ).backward()
            second.step()
            first.zero_grad()
            F.softplus(-critic(fake)).mean().backward()
            first.step()
        assert codes(one.report()) == codes(two.report()) == []


def test_equal_batches_made_anew_are_found_and_one_tensor_is_not() -> None:
    for anew in (True, False):
        model, (x, y) = net(), batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsight.watch(model, optimizer) as watched:
            for _ in range(20):
                optimizer.zero_grad()
                F.cross_entropy(model(x.clone() if anew else x), y).backward()
                optimizer.step()
            assert codes(watched.report()) == (["GS502"] if anew else [])


def test_a_copied_or_saved_model_carries_nothing_of_ours() -> None:
    model = net()
    with gradsight.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as watched:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(batch()[0])
            twin(batch()[0])
        assert watched.report().steps == 0
    assert not model._forward_pre_hooks
    torch.save(model, io.BytesIO())


def test_missing_unused_and_frozen_parameters_are_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.missing, self.still = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.still(self.missing(self.used(x)))

    torch.manual_seed(0)
    model = Model()
    groups = [{"params": [*model.used.parameters(), *model.unused.parameters()]}]
    groups.append({"params": list(model.still.parameters()), "lr": 0.0})
    optimizer = torch.optim.SGD(groups, lr=0.01)
    with gradsight.watch(model, optimizer) as watched:
        for _ in range(40):
            optimizer.zero_grad()
            model.missing.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
        found = {finding.code: finding.parameters for finding in watched.report().findings}
    assert found == {
        "GS301": ("unused.weight", "unused.bias"),
        "GS302": ("missing.weight", "missing.bias"),
        "GS304": ("still.weight", "still.bias"),
    }


@pytest.mark.parametrize("how", ["put back", "no learning rate"])
def test_weights_that_stay_the_same_are_found(how: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if how == "no learning rate" else 0.1)
    old = copy.deepcopy(model[2].state_dict())
    with gradsight.watch(model, optimizer) as watched:
        for _ in range(40):
            x, y = batch()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if how == "put back":
                model[2].load_state_dict(old)
        found = {finding.code: finding.parameters for finding in watched.report().findings}
    assert found == {
        "GS304": ("2.weight", "2.bias")
        if how == "put back"
        else ("0.weight", "0.bias", "2.weight", "2.bias")
    }


@pytest.mark.parametrize("given", ["all", "trainable"])
def test_a_frozen_backbone_is_left_alone(given: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if given == "all" or p.requires_grad], lr=0.1
    )
    with gradsight.watch(model, optimizer) as watched:
        for _ in range(40):
            x, y = batch()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert codes(watched.report()) == []


def test_a_start_worse_than_guessing_is_found_through_scaling_and_accumulation() -> None:
    model, ratios = net(), []
    with torch.no_grad():
        model[2].weight.mul_(100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with gradsight.watch(model, optimizer) as watched:
        for _ in range(12):
            for _ in range(2):
                x, y = batch()
                loss = F.cross_entropy(model(x), y)
                scaler.scale(loss / 2).backward()
            ratios.append(float(loss.detach()) / math.log(3))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found = {finding.code: finding for finding in watched.report().findings}
    told = ", ".join(f"{ratio:.3g}" for ratio in ratios[:3])
    assert found["GS108"].evidence == f"the first losses are {told} times that of a guess"


def test_findings_and_abstentions_are_in_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(clear="never", run_dir=tmp_path)
    run = gradsight.open_run(tmp_path)
    assert [finding.code for finding in run.findings()] == ["GS305"]
    assert "GS404" in [each.code for each in run.abstentions()]
    assert main(["report", str(tmp_path)]) == 2
    assert "❌ critical: 1 finding in 30 steps" in capsys.readouterr().out
    text = (tmp_path / "report.md").read_text()
    for heading in (
        "# Gradsight report",
        "### Summary",
        "### Issues Detected",
        "### Code to Add",
        "## Gradient norms by block",
    ):
        assert heading in text.splitlines()


def test_a_healthy_run_exits_with_0_and_a_warning_with_1(tmp_path: Path) -> None:
    train(run_dir=tmp_path / "healthy")
    assert main(["report", str(tmp_path / "healthy")]) == 0
    train(run_dir=tmp_path / "tuned", health={"GS402": {"ratio": 1e6}})
    assert main(["report", str(tmp_path / "tuned")]) == 1


def test_a_run_without_steps_is_reported_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(steps=0, run_dir=tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert "no steps: no optimizer step was seen" in capsys.readouterr().out


def test_without_health_there_is_no_verdict() -> None:
    with (
        gradsight.watch(net(), health=False) as watched,
        pytest.raises(
            UsageError, match="this watch judges nothing: it was opened with health=False"
        ),
    ):
        watched.report()


def test_a_fault_of_the_judge_does_not_stop_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("judge is ill")

    monkeypatch.setattr("gradsight.health.judge.Judge.observe", fail)
    with pytest.warns(UserWarning, match="Gradsight stopped judging: RuntimeError: judge is ill"):
        train(run_dir=tmp_path)
    assert len(list(gradsight.open_run(tmp_path).steps())) == 30


def test_dead_units_agree_with_the_plain_loop() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(10, 4, 3) * (torch.rand(10, 1, 1) > 0.7) for _ in range(4)]
    life = UnitLife([1])
    for step, gradient in enumerate(gradients):
        life.look(step, [0, 1], [torch.ones(3), gradient])
    assert life.reading().read() == {1: pytest.approx(exact_dead_share(gradients))}


@pytest.mark.parametrize(
    ("scale", "factor", "expected"),
    [
        (2.0**16, math.nan, [5]),
        (2.0**126, 1.0, []),
        (2.0**16, math.inf, [13]),  # at the ninth in a row
    ],
    ids=["a loss that is NaN", "a scale that comes down", "overflows that do not stop"],
)
def test_steps_that_a_scaler_leaves_out(
    scale: float, factor: float, expected: list[int], tmp_path: Path
) -> None:
    """What raises the alarm is found, and what is left alone is left alone by both."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    dumper = gradsight.GradientDumper(tmp_path, start_step=10**6, dump_on="critical")
    with gradsight.watch(model, optimizer, run_dir=tmp_path, dump=dumper, quiet=True):
        for step in range(16):
            loss = 100 * model(torch.randn(8, 4)).square().mean()
            if step >= 5:
                loss = loss * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = gradsight.open_run(tmp_path)
    assert sum(step.skipped for step in run.steps()) >= 4
    found = [each for each in run.findings() if each.code in ("GS103", "GS104")]
    assert [each.first_step for each in found][:1] == expected
    assert [incident.step for incident in run.incidents()] == expected
    dumps = (tmp_path / "gradient_dumper").glob("step*")
    assert [path.name for path in dumps] == [f"step{step}" for step in expected]
