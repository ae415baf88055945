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
from gradsight.errors import GradsightWarning
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
        loops.clip_by_hand,
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
        for _ in range(12):
            (model(torch.randn(2, 4)).square().mean() * 1e6).backward()
            optimizer.step()
            optimizer.zero_grad()
        report = watched.report()
    critical = [finding for finding in report.findings if finding.severity == "critical"]
    assert [finding.code for finding in critical] == ["GS102"]
    (folder,) = (tmp_path / "gradient_dumper").iterdir()
    metadata = get_checkpoint_metadata(folder / "full_gradients")
    assert metadata.reason.startswith("GS102")
    assert metadata.gradient == "as the optimizer used it, after any clipping"
    norms = [
        float(gradient.norm())
        for gradient in load_keys(folder / "full_gradients", list(metadata.tensors))
    ]
    recorded = {step.step: step.total_norm for step in gradsight.open_run(tmp_path).steps()}
    assert math.hypot(*norms) == pytest.approx(recorded[metadata.step], rel=1e-5)


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
