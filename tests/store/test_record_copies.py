"""What trackers, dumps and histograms have of a step is what its record says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import gradsight
from gradsight import GradientDumper, get_checkpoint_metadata, load_keys
from store.wandb_file import runs

pytestmark = pytest.mark.usefixtures("offline")
STEPS = 6
Edit = Callable[[nn.Module], object]


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def divide(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.div_(8)


def divide_and_clip(model: nn.Module) -> None:
    divide(model)
    clip(model)


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.sign() * 0.01


EDITS = [lambda model: None, clip, divide, divide_and_clip, replace]
NAMES = ["plain", "clipped", "divided", "divided_and_clipped", "replaced"]


def train(run_dir: Path, edit: Edit, **options: object) -> list[dict[str, float]]:
    """Returns the update ratio of every parameter at every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ratios = []
    with gradsight.watch(model, optimizer, run_dir=run_dir, quiet=True, **options):
        for _ in range(STEPS):
            optimizer.zero_grad()
            (5 * model(torch.randn(8, 6)).square().mean()).backward()
            edit(model)
            before = {name: each.detach().clone() for name, each in model.named_parameters()}
            optimizer.step()
            ratios.append(
                {
                    name: float((each.detach() - before[name]).norm() / before[name].norm())
                    for name, each in model.named_parameters()
                }
            )
    return ratios


@pytest.mark.parametrize("edit", EDITS, ids=NAMES)
def test_trackers_have_the_recorded_numbers(edit: Edit, tmp_path: Path) -> None:
    train(tmp_path, edit, sinks=["tensorboard", "wandb"])
    run = gradsight.open_run(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    (tracked,) = runs(tmp_path)
    rows = tracked.by_step()
    for stat in run.parameter_stats():
        name = f"gradients/{stat.parameter}/norm"
        points = {event.step: event.value for event in events.Scalars(name)}
        assert points[stat.step] == pytest.approx(stat.l2, rel=1e-6)
        assert rows[stat.step][name] == pytest.approx(stat.l2, rel=1e-6)
    for step in run.steps():
        row = rows[step.step]
        assert row["gradients/total_norm"] == pytest.approx(step.total_norm, rel=1e-6)
        assert row.get("gradients/clip_coef") == pytest.approx(step.clip_coef, rel=1e-6)


@pytest.mark.parametrize("edit", EDITS, ids=NAMES)
def test_dumps_hold_the_recorded_gradient(edit: Edit, tmp_path: Path) -> None:
    dumper = GradientDumper(tmp_path, step_interval=2)
    train(tmp_path, edit, dump=dumper)
    dumper.close()
    run = gradsight.open_run(tmp_path)
    labels = {step.step: step.gradient for step in run.steps()}
    stats = {(stat.step, stat.parameter): stat.l2 for stat in run.parameter_stats()}
    for step in range(0, STEPS, 2):
        folder = tmp_path / "gradient_dumper" / f"step{step}" / "full_gradients"
        metadata = get_checkpoint_metadata(folder)
        assert metadata.gradient == labels[step]
        for name, tensor in zip(
            metadata.tensors, load_keys(folder, list(metadata.tensors)), strict=True
        ):
            assert float(tensor.norm()) == pytest.approx(stats[step, name], rel=1e-5)


@pytest.mark.parametrize("edit", EDITS, ids=NAMES)
def test_histograms_and_update_ratios_are_of_the_recorded_step(edit: Edit, tmp_path: Path) -> None:
    every = gradsight.Schedule(step_interval=2)
    ratios = train(tmp_path, edit, histograms=every)
    run = gradsight.open_run(tmp_path)
    stats = {(stat.step, stat.parameter): stat for stat in run.parameter_stats()}
    for histogram in run.histograms():
        if histogram.parameter is not None:
            stat = stats[histogram.step, histogram.parameter]
            assert histogram.size == histogram.sampled
            assert stat.update_ratio == pytest.approx(
                ratios[histogram.step][histogram.parameter], rel=1e-4
            )
    assert {step for step, _ in stats} == set(range(STEPS))


@pytest.mark.parametrize("edit", EDITS, ids=NAMES)
def test_schedule_leaves_out_whole_steps(edit: Edit, tmp_path: Path) -> None:
    train(tmp_path / "all", edit)
    train(tmp_path / "some", edit, stats=gradsight.Schedule(step_interval=3))
    every = {step.step: step for step in gradsight.open_run(tmp_path / "all").steps()}
    for step in gradsight.open_run(tmp_path / "some").steps():
        is_due = step.step % 3 == 0
        assert step.total_norm == (every[step.step].total_norm if is_due else None)
        assert step.lr == every[step.step].lr


def train_many_parameters(run_dir: Path, edit: Edit, max_bytes: str | None) -> None:
    """Record 120 steps of 400 parameters, which take more than 500 KB."""
    torch.manual_seed(0)
    weights = nn.ParameterList([torch.randn(1) for _ in range(400)])
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.01)
    watching = {"quiet": True, "health": False, "max_bytes": max_bytes}
    with gradsight.watch(weights, optimizer, run_dir=run_dir, **watching):
        for _ in range(120):
            optimizer.zero_grad()
            (5 * (torch.randn(8, 400) @ torch.cat(list(weights))).square().mean()).backward()
            edit(weights)
            optimizer.step()


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(clip, marks=pytest.mark.slow, id="clipped"),
        pytest.param(divide_and_clip, id="divided_and_clipped"),
    ],
)
def test_thinned_steps_keep_their_label_and_the_extremes(edit: Edit, tmp_path: Path) -> None:
    train_many_parameters(tmp_path / "all", edit, max_bytes=None)
    train_many_parameters(tmp_path / "thinned", edit, max_bytes="500KB")
    every = {step.step: step for step in gradsight.open_run(tmp_path / "all").steps()}
    kept = list(gradsight.open_run(tmp_path / "thinned").steps())
    thinned = [step for step in kept if step.gradient.startswith("thinned: ")]
    label = every[0].gradient
    assert thinned
    assert all(step.gradient.endswith(label) or label == "true" for step in thinned)
    lowest, highest = thinned[::2], thinned[1::2]
    for low, high in zip(lowest, highest, strict=True):
        norms = [every[number].total_norm for number in range(low.step, high.step + 1)]
        assert (low.total_norm, high.total_norm) == (min(norms), max(norms))
    for step in kept:
        if step not in thinned:
            assert step.total_norm == every[step.step].total_norm
