"""The hand on the brake: stopping, skipping, calling, alerting."""

import copy
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsight
import warm
from gradsight.cli import main
from gradsight.errors import GradsightError, GradsightWarning
from gradsight.values.findings import Finding
from launch import run_ranks

STEPS = 12
BAD = (3, 4, 8)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int, bad: tuple[int, ...] = (), value: float = math.nan) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(8, 4, generator=generator)
    if step in bad:
        rows[3, 1] = value
    return rows


def train(
    net: nn.Module,
    optimizer: Optimizer,
    steps: list[int],
    bad: tuple[int, ...] = (),
    value: float = math.nan,
) -> None:
    for step in steps:
        loss = net(batch(step, bad, value)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Foreign(Optimizer):
    """As others write them: it counts in its groups and in itself, and decays whatever it holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0})
        self.made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.made += 1
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.data.mul_(0.99)
                momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                momentum.mul_(0.9)
                if parameter.grad is not None:
                    momentum.add_(parameter.grad)
                    parameter.data.sub_(momentum, alpha=group["lr"] / (group["k"] + self.made))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "not torch's": Foreign,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_step_leaves_weights_and_optimizer_as_they_were(
    name: str, value: float, tmp_path: Path
) -> None:
    net = model()
    twin = copy.deepcopy(net)
    optimizer = OPTIMIZERS[name](net.parameters())
    twins = OPTIMIZERS[name](twin.parameters())
    # Statistics are due on few steps; every bad one is left out all the same.
    options: dict[str, Any] = {"stats": gradsight.Schedule(step_interval=5), "quiet": True}
    with gradsight.watch(net, optimizer, run_dir=tmp_path, on_finding="skip", **options):
        train(net, optimizer, list(range(STEPS)), BAD, value)
    train(twin, twins, [step for step in range(STEPS) if step not in BAD])
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert same_state(optimizer, twins)
    skipped = [step.step for step in gradsight.open_run(tmp_path).steps() if step.skipped]
    assert skipped == list(BAD)


def same_state(one: Optimizer, other: Optimizer) -> bool:
    mine = one.state_dict()["state"]
    theirs = other.state_dict()["state"]
    options = [each.state_dict()["param_groups"] for each in (one, other)]
    return (
        options[0] == options[1]
        and mine.keys() == theirs.keys()
        and all(
            torch.equal(torch.as_tensor(mine[key][name]), torch.as_tensor(theirs[key][name]))
            for key in mine
            for name in theirs[key]
        )
    )


@pytest.mark.parametrize(("value", "code"), [(math.nan, "GS103"), (math.inf, "GS104")])
def test_a_skipped_step_is_found_though_its_loss_is_finite(
    value: float, code: str, tmp_path: Path
) -> None:
    """Only what a GradScaler leaves out by itself is nobody's fault."""
    net = model()
    factor = [1.0]
    net[2].bias.register_hook(lambda gradient: gradient * factor[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    told: list[Finding] = []
    actions = {code: ["skip", told.append]}
    with gradsight.watch(net, optimizer, run_dir=tmp_path, on_finding=actions, quiet=True):
        for step in range(4):
            factor[0] = value if step == 2 else 1.0
            net(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(finding.code, finding.first_step) for finding in told] == [(code, 2)]
    run = gradsight.open_run(tmp_path)
    assert [finding.code for finding in run.findings()] == [code]
    assert [step.skipped for step in run.steps()] == [False, False, True, False]


def test_a_gradient_that_is_broken_after_backward_is_skipped_too(tmp_path: Path) -> None:
    net = model()
    twin = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with gradsight.watch(net, optimizer, run_dir=tmp_path, on_finding="skip", quiet=True):
        for step in range(4):
            net(batch(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if step == 2:
                assert net[2].weight.grad is not None
                net[2].weight.grad[0, 3] = -math.inf
            optimizer.step()
            optimizer.zero_grad()
    twins = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for step in (0, 1, 3):
        twin(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        twins.step()
        twins.zero_grad()
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
    skipped = [step.skipped for step in gradsight.open_run(tmp_path).steps()]
    assert skipped == [False, False, True, False]


def test_the_gradient_of_a_skipped_step_is_still_there() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsight.watch(net, optimizer, on_finding={"GS103": "skip"}, quiet=True):
        net(batch(0, (0,))).mean().backward()
        optimizer.step()
        assert all(p.grad is not None and p.grad.isnan().any() for p in net[0].parameters())


def test_of_two_optimizers_only_the_one_with_the_bad_gradient_is_left_out() -> None:
    net = model()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.SGD(net[2].parameters(), lr=0.1)
    before = copy.deepcopy(net)
    with gradsight.watch(net, [first, second], on_finding="skip", quiet=True):
        net(batch(0)).mean().backward()
        assert net[0].weight.grad is not None
        net[0].weight.grad[0, 0] = math.nan  # by hand: nothing but this entry is bad
        net[2](torch.ones(1, 8)).mean().backward()
        (net[0].weight * math.nan).sum().backward()
        first.step()
        second.step()
    assert torch.equal(net[0].weight, before[0].weight)
    assert not torch.equal(net[2].weight, before[2].weight)


def test_a_closure_can_be_skipped_too() -> None:
    for make in (
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
        lambda p: torch.optim.AdamW(p, lr=0.1),
    ):
        net = model()
        twin = copy.deepcopy(net)
        optimizer = make(net.parameters())
        twins = make(twin.parameters())

        def step(net: nn.Module, optimizer: Optimizer, number: int, bad: tuple[int, ...]) -> None:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = net(batch(number, bad)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        with gradsight.watch(net, optimizer, on_finding="skip", quiet=True):
            for number in range(6):
                step(net, optimizer, number, (2,))
        for number in (0, 1, 3, 4, 5):
            step(twin, twins, number, ())
        for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_training_without_a_bad_step_is_bit_for_bit_the_same() -> None:
    net = model()
    twin = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    actions = {"critical": ["skip", "stop"], "warning": print}
    with gradsight.watch(net, optimizer, on_finding=actions, health={"GS401": False}, quiet=True):
        train(net, optimizer, list(range(STEPS)))
    train(twin, torch.optim.AdamW(twin.parameters(), lr=0.1), list(range(STEPS)))
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_stop_leaves_the_step_of_the_finding(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = []
    with gradsight.watch(
        net, optimizer, run_dir=tmp_path, on_finding={"GS103": "stop"}, quiet=True
    ) as watched:
        with pytest.raises(gradsight.StopTraining) as stopped:
            for step in range(STEPS):
                train(net, optimizer, [step], BAD)
                made.append(step)
        assert watched.asked_to_stop is not None
    assert made == [0, 1, 2]
    assert stopped.value.finding.code == "GS103"
    assert stopped.value.finding.first_step == 3
    assert isinstance(stopped.value, GradsightError)
    steps = list(gradsight.open_run(tmp_path).steps())
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert [each.code for each in gradsight.open_run(tmp_path).findings()] == ["GS103"]


def test_stop_by_hand_leaves_watch_step() -> None:
    net = model()
    with gradsight.watch(net, on_finding="stop", quiet=True) as watched:
        net(batch(0, (0,))).mean().backward()
        with pytest.raises(gradsight.StopTraining):
            watched.step()


def test_a_callable_gets_each_finding_once_and_its_faults_are_problems(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[Finding] = []

    def act(finding: Finding) -> None:
        seen.append(finding)
        raise KeyError("mine")

    with (
        pytest.warns(GradsightWarning, match="on_finding failed for GS103: KeyError"),
        gradsight.watch(net, optimizer, run_dir=tmp_path, on_finding=act, quiet=True),
    ):
        train(net, optimizer, list(range(STEPS)), BAD)
    codes = [finding.code for finding in seen]
    assert "GS103" in codes
    assert len(codes) == len(set(codes))
    problems = {problem.key: problem.count for problem in gradsight.open_run(tmp_path).problems()}
    assert problems["on_finding"] == len(codes)


def test_alerts_without_a_tracker_reach_nobody_and_that_is_said(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with (
        pytest.warns(GradsightWarning, match="reaches nobody"),
        gradsight.watch(net, optimizer, run_dir=tmp_path, on_finding="alert", quiet=True),
    ):
        train(net, optimizer, [0, 1, 2, 3], BAD)


def test_trackio_is_alerted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = (
        "import gradsight, torch\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "net = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        f"with gradsight.watch(net, optimizer, run_dir={str(tmp_path / 'run')!r}, sinks='trackio',"
        " on_finding={'GS103': 'alert'}, quiet=True):\n"
        "    net(torch.full((2, 4), float('nan'))).mean().backward()\n"
        "    optimizer.step()\n"
        "alerts = SQLiteStorage.get_alerts('gradsight')\n"
        "print([(each['title'], each['level']) for each in alerts])\n"
    )
    done = warm.run(["-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[('GS103 NaN gradient', 'error')]" in done.stdout or "GS103" in done.stdout, done.stdout


def test_what_cannot_be_meant_is_refused_at_opening(tmp_path: Path) -> None:
    net = model()
    for given in ("halt", {"GS999": "stop"}, {"GS201": "skip"}):
        with pytest.raises(GradsightError, match="on_finding"):
            gradsight.watch(net, run_dir=tmp_path / "run", on_finding=given)
    with pytest.raises(GradsightError, match="judges nothing"):
        gradsight.watch(net, on_finding="stop", health=False)
    assert not (tmp_path / "run").exists()


def test_findings_for_scripts_that_poll(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsight.watch(net, optimizer, run_dir=tmp_path, quiet=True):
        train(net, optimizer, [0, 1, 2])
        # Read while it is being written.
        assert main(["findings", str(tmp_path), "--json"]) == 0
        early = json.loads(capsys.readouterr().out)
        train(net, optimizer, list(range(3, 6)), (3,))
    assert early["status"] == "healthy"
    assert early["findings"] == []
    assert main(["findings", str(tmp_path), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "critical"
    assert found["step"] == 5
    assert found["findings"][0]["code"] == "GS103"
    assert main(["findings", str(tmp_path), "--since", "3"]) == 2
    assert "GS103" in capsys.readouterr().out
    assert main(["findings", str(tmp_path), "--since", "4", "--json"]) == 0
    assert main(["findings", str(tmp_path / "nowhere")]) == 64
    assert main(["findings", str(tmp_path), "--since=-1"]) == 64


def test_since_is_the_step_at_which_a_finding_was_made(tmp_path: Path) -> None:
    finding = Finding("GS202", "rising", "warning", (), 40, "e", "m", "r", "f", made_step=90)
    assert finding.made_step == 90
    assert Finding("GS202", "rising", "warning", (), 40, "e", "m", "r", "f").made_step == 40


def test_what_takes_patience_is_made_later_than_it_began() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    seen: list[Finding] = []
    patient = {"GS105": {"patience": 4}}
    with gradsight.watch(net, optimizer, on_finding=seen.append, health=patient, quiet=True):
        for _ in range(6):
            (net(torch.ones(2, 4)).mean() * 1e-9).backward()
            optimizer.step()
            optimizer.zero_grad()
    (small,) = [finding for finding in seen if finding.code == "GS105"]
    assert (small.first_step, small.made_step) == (0, 3)


def test_switched_off_does_nothing_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSIGHT", "0")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    backward = torch.autograd.backward
    with gradsight.watch(net, optimizer, run_dir=tmp_path / "run", sinks=["console"]) as watched:
        assert torch.autograd.backward is backward
        watched.ids([1, 2])
        train(net, optimizer, [0, 1])
        watched.log(loss=1.0)
        watched.step(loss=2.0)
        watched.log_scalar("x", 1.0, 0)
    watched.close()
    assert watched.report().steps == 0
    assert watched.asked_to_stop is None
    assert os.listdir(tmp_path) == []


def test_ranks_skip_and_stop_alike(tmp_path: Path) -> None:
    printed = run_ranks(Path(__file__).with_name("brake_ranks.py"), tmp_path)
    first, second = json.loads(printed.split("RESULT ")[1].splitlines()[0])
    assert first == second
    # The bad step is 2; where only rank 0 judges, all ranks know of it one step later.
    assert set(first) <= {2, 3}
    for kind in ("ddp", "fsdp"):
        steps = gradsight.open_run(tmp_path / kind).steps()
        assert [step.step for step in steps if step.skipped] == [2, 5]
