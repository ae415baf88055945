"""watch(dump=...): the gradient of due and of critical steps, before clipping, whatever the loop
looks like.
"""

import contextlib
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsight
from gradsight import GradientDumper, get_checkpoint_metadata, load_keys
from gradsight.errors import GradsightWarning, UsageError
from session import loops
from session.loops import Case


def watched(run_dir: Path, **options: object) -> object:
    def start(model: nn.Module, optimizers: object) -> object:
        return gradsight.watch(
            model, optimizers, run_dir=run_dir, dump=GradientDumper(run_dir, **options)
        )  # type: ignore[arg-type]

    return start


@pytest.mark.parametrize(
    "loop",
    [
        loops.plain,
        loops.clip_norm,
        loops.accumulation,
        loops.scaler_with_clipping,
        loops.scaler_fused,
        loops.lbfgs,
        loops.by_hand,
        loops.compiled,
        loops.checkpointed,
    ],
    ids=lambda loop: loop.__name__,
)
def test_what_is_dumped_is_the_gradient(loop: object, tmp_path: Path) -> None:
    case = Case(watched(tmp_path, start_step=3, step_interval=8))  # type: ignore[arg-type]
    loop(case)  # type: ignore[operator]
    folders = sorted(
        (tmp_path / "gradient_dumper").iterdir(),
        key=lambda folder: int(folder.name.removeprefix("step")),
    )
    assert [folder.name for folder in folders] == ["step3", "step11", "step19"]
    steps = {step.step: step for step in gradsight.open_run(tmp_path).steps()}
    for folder in folders:
        number = int(folder.name.removeprefix("step"))
        metadata = get_checkpoint_metadata(folder / "full_gradients")
        assert (metadata.step, metadata.gradient) == (number, "true")
        expected = case.expected[number]
        assert set(metadata.tensors) == set(expected)
        for name, tensor in zip(
            expected, load_keys(folder / "full_gradients", list(expected)), strict=True
        ):
            torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4, atol=1e-6)
        assert steps[number].gradient == "true"
    alone = Case(lambda model, optimizers: contextlib.nullcontext())
    loop(alone)  # type: ignore[operator]
    assert all(torch.equal(a, b) for a, b in zip(case.weights, alone.weights, strict=True))


def test_a_critical_step_is_dumped_out_of_schedule(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dumper = GradientDumper(tmp_path, start_step=1000, dump_on="critical")
    with gradsight.watch(model, optimizer, run_dir=tmp_path, dump=dumper):
        for step in range(6):
            loss = model(torch.randn(2, 4)).square().mean() * (math.nan if step == 3 else 1.0)
            loss.backward()
            if step == 3:
                optimizer.zero_grad(set_to_none=False)  # the user's guard comes after the look
            optimizer.step()
            optimizer.zero_grad()
    assert [folder.name for folder in (tmp_path / "gradient_dumper").iterdir()] == ["step3"]
    (weight,) = load_keys(tmp_path / "gradient_dumper" / "step3" / "full_gradients", ["weight"])
    assert weight.isnan().all()


def test_a_critical_finding_is_dumped_once(tmp_path: Path) -> None:
    """Finite, but far too large: judged when the step is made."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    dumper = GradientDumper(tmp_path, start_step=1000, dump_on="critical")
    with gradsight.watch(model, optimizer, run_dir=tmp_path, dump=dumper) as watched:
        for step in range(12):
            # Larger than ever: what was as large from the start is a unit.
            factor = 1e6 if step > 3 else 1.0
            (model(torch.randn(2, 4)).square().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        report = watched.report()
    critical = [finding for finding in report.findings if finding.severity == "critical"]
    assert [finding.code for finding in critical] == ["GS102"]
    (folder,) = (tmp_path / "gradient_dumper").iterdir()
    metadata = get_checkpoint_metadata(folder / "full_gradients")
    assert metadata.reason.startswith("GS102")
    assert metadata.gradient == "true"
    norms = [
        float(gradient.norm())
        for gradient in load_keys(folder / "full_gradients", list(metadata.tensors))
    ]
    recorded = {step.step: step.total_norm for step in gradsight.open_run(tmp_path).steps()}
    assert math.hypot(*norms) == pytest.approx(recorded[metadata.step], rel=1e-5)


class Clipped:
    """A watched loop whose loss is multiplied at some steps, and whose gradient is clipped.

    It keeps the gradient of every step as backward left it.
    """

    def __init__(self, run_dir: Path, steps: int = 30, **options: object) -> None:
        torch.manual_seed(0)
        self.run_dir = run_dir
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.dumper = GradientDumper(run_dir, **options)  # type: ignore[arg-type]
        self.steps = steps
        self.true: list[dict[str, torch.Tensor]] = []

    def train(self, factors: dict[int, float], clip: object, **watching: object) -> None:
        watched = gradsight.watch(
            self.model, self.optimizer, run_dir=self.run_dir, dump=self.dumper, **watching
        )
        with watched:
            for step in range(self.steps):
                loss = self.model(torch.randn(8, 6)).square().mean() * factors.get(step, 1.0)
                loss.backward()
                named = self.model.named_parameters()
                self.true.append({name: each.grad.clone() for name, each in named})
                clip(self.model)  # type: ignore[operator]
                self.optimizer.step()
                self.optimizer.zero_grad()

    def dumped(self) -> dict[int, Path]:
        root = self.run_dir / "gradient_dumper"
        steps = sorted(int(folder.name.removeprefix("step")) for folder in root.iterdir())
        return {step: root / f"step{step}" / "full_gradients" for step in steps}


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize("recorder", [True, False])
def test_a_spike_is_dumped_as_it_was_before_clipping(recorder: bool, tmp_path: Path) -> None:
    loop = Clipped(tmp_path, start_step=1000, dump_on="warning")
    loop.train({20: 1000.0, 26: 2000.0}, clip_norm, recorder=recorder)
    recorded = {step.step: step for step in gradsight.open_run(tmp_path).steps()}
    assert list(loop.dumped()) == [20, 26]
    for step, folder in loop.dumped().items():
        metadata = get_checkpoint_metadata(folder)
        assert (metadata.gradient, metadata.reason) == ("true", "GS201 gradient spike")
        assert metadata.clip_coef == pytest.approx(recorded[step].clip_coef, rel=1e-4)
        for name, tensor in zip(
            metadata.tensors, load_keys(folder, list(metadata.tensors)), strict=True
        ):
            assert torch.equal(tensor, loop.true[step][name])


def test_the_first_bad_step_stays(tmp_path: Path) -> None:
    loop = Clipped(tmp_path, steps=50, step_interval=10, dump_on="critical", keep_last=2)
    loop.train(dict.fromkeys(range(20, 50), math.nan), clip_norm)
    assert list(loop.dumped()) == [20, 30, 40]
    assert get_checkpoint_metadata(loop.dumped()[20]).reason.startswith("GS103 NaN gradient")
    assert get_checkpoint_metadata(loop.dumped()[40]).reason == "schedule"


def clip_a_little(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 150.0)


def clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 150.0)


def test_what_is_found_later_is_restored_or_called_what_it_is(tmp_path: Path) -> None:
    """GS101 wants three steps, and to know what clipping leaves: nobody can know it early."""
    factors = {step: 500.0 * 1.2**step for step in range(30)}
    plain = Clipped(tmp_path / "plain", start_step=1000, dump_on="warning")
    plain.train(factors, clip_a_little, health={"GS401": False})
    (step,) = plain.dumped()
    metadata = get_checkpoint_metadata(plain.dumped()[step])
    assert metadata.reason == "GS101 large gradient"
    assert metadata.gradient.startswith("true, restored: the clipped one divided by 0.")
    for name, tensor in zip(
        metadata.tensors, load_keys(plain.dumped()[step], list(metadata.tensors)), strict=True
    ):
        torch.testing.assert_close(tensor, plain.true[step][name], rtol=1e-4, atol=0)
    by_value = Clipped(tmp_path / "value", start_step=1000, dump_on="warning")
    larger = {step: 10 * factor for step, factor in factors.items()}
    by_value.train(larger, clip_value, health={"GS401": False})
    for folder in by_value.dumped().values():
        metadata = get_checkpoint_metadata(folder)
        assert metadata.gradient == "as the optimizer used it, after any clipping"


def test_a_gradient_that_was_given_up_before_the_step_is_not_dumped(tmp_path: Path) -> None:
    """A guard that throws a broken gradient away and takes another batch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dumper = GradientDumper(tmp_path, start_step=1000, dump_on="critical")
    with gradsight.watch(model, optimizer, run_dir=tmp_path, dump=dumper):
        for step in range(6):
            if step == 3:
                (model(torch.randn(2, 4)).square().mean() * math.nan).backward()
                optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not (tmp_path / "gradient_dumper").exists()


def test_overflows_that_a_scaler_settles_are_no_findings(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    dumper = GradientDumper(tmp_path, start_step=1000, dump_on="critical")
    large = {"GS102": False}
    with gradsight.watch(model, optimizer, run_dir=tmp_path, dump=dumper, health=large):
        for _ in range(8):
            # The loss is finite, its gradient overflows until the scale has come down.
            scaler.scale(model(torch.full((2, 4), 1e3)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    skipped = [step.skipped for step in gradsight.open_run(tmp_path).steps()]
    assert skipped == [True, True] + [False] * 6
    assert not (tmp_path / "gradient_dumper").exists()


def test_dump_on_without_a_judge_is_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    dumper = GradientDumper(tmp_path, dump_on="critical")
    with (
        pytest.warns(GradsightWarning, match="dump_on dumps what is judged bad, but health=False"),
        gradsight.watch(model, None, run_dir=tmp_path, health=False, dump=dumper) as watch,
    ):
        model(torch.randn(2, 4)).sum().backward()
        watch.step()


def test_gradients_that_are_never_there_at_once_are_reported(tmp_path: Path) -> None:
    with pytest.warns(
        GradsightWarning,
        match="step 0 was due for a dump, but at no moment were all its gradients there",
    ):
        loops.optimizer_in_backward(Case(watched(tmp_path)))  # type: ignore[arg-type]
    run = gradsight.open_run(tmp_path)
    assert len(list(run.steps())) == loops.STEPS
    assert [problem.count for problem in run.problems() if problem.key == "dump-missing"] == [
        loops.STEPS
    ]


def test_a_dump_that_fails_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "gradient_dumper").write_text("a file is in the way")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dumper = GradientDumper(tmp_path / "blocked")
    warned = pytest.warns(GradsightWarning, match="gradient dump of step 0")
    with warned, gradsight.watch(model, optimizer, run_dir=tmp_path / "run", dump=dumper):
        for _ in range(3):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = gradsight.open_run(tmp_path / "run")
    assert len(list(run.steps())) == 3
    assert any(problem.key.startswith("dump-") for problem in run.problems())


def test_a_dumper_that_was_closed_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    dumper = GradientDumper(tmp_path)
    dumper.close()
    with pytest.raises(UsageError, match="dump is a GradientDumper that was closed: make a new"):
        gradsight.watch(model, None, dump=dumper)
