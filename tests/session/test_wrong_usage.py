"""Wrong usages of watch and its neighbours: each is refused in words of ours, before any harm."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import gradsight
from gradsight import MetricsTracker, Schedule, open_run, watch
from gradsight.errors import GradsightWarning, UsageError


class Step(NamedTuple):
    """Stands for a step of a record, which has its number as `.step`."""

    step: int


def net(width: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_gradients() -> nn.Module:
    model = net()
    model(torch.rand(4, 3)).sum().backward()
    return model


def train(model: nn.Linear, steps: int = 2, **options: Any) -> None:
    optimizer = sgd(model)
    with watch(model, optimizer, **options):
        for _ in range(steps):
            model(torch.rand(4, model.in_features)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


OPTIONS = [
    ({"run_dir": 3}, "run_dir must be a path, such as 'runs/first', got 3"),
    ({"run_dir": True}, "run_dir must be a path"),
    ({"run_dir": b"runs"}, "run_dir must be a path"),
    ({"run_dir": ""}, "run_dir must be a path, .* got an empty text"),
    ({"stats": 10}, r"stats must be a Schedule, such as gradsight.Schedule\(step_interval=10\)"),
    ({"stats": None}, "stats must be a Schedule, .* got None"),
    ({"histograms": False}, r"histograms must be a Schedule, .*\(step_interval=50\), got False"),
    ({"health": None}, "health must be True, False, .* got None"),
    ({"health": 1}, "health must be True, False, .* got int"),
    ({"health": ["GS103"]}, "health must be True, False, .* got list"),
    ({"health": {"GS203": {"patience": 0}}}, "GS203: patience must be a whole number of 1 or more"),
    ({"health": {"GS201": {"factor": float("nan")}}}, "GS201: factor must be a number, got nan"),
    ({"dump": "runs"}, r"dump must be a GradientDumper, such as .* got 'runs'"),
    ({"dump": True}, "dump must be a GradientDumper"),
    ({"dump": gradsight.GradientDumper}, "dump must be a GradientDumper"),
    ({"recorder": 1}, 'recorder must be True, False or "batch", got 1'),
    ({"recorder": None}, 'recorder must be True, False or "batch", got None'),
    ({"start_step": 10**30}, r"start_step must be below 2\*\*63"),
    ({"start_step": -1}, "start_step must be a whole number of 0 or more, got -1"),
    ({"start_step": 2.5}, "start_step must be a whole number of 0 or more, got 2.5"),
    ({"start_step": True}, "start_step must be a whole number of 0 or more, got True"),
    ({"start_step": "a"}, "start_step must be a whole number of 0 or more, got 'a'"),
    ({"sinks": 5}, r'sinks must be a sequence of names, such as \["tensorboard"\], .* got int'),
    ({"sinks": {"console": 1}}, "sinks must be a sequence of names, .* got dict"),
    ({"sinks": [MetricsTracker]}, "sinks must be objects, got the class MetricsTracker"),
    ({"sinks": [None]}, "NoneType has none"),
    ({"quiet": "yes"}, "quiet must be True or False, got 'yes'"),
    ({"diagnose_seconds": None}, "diagnose_seconds must be 0 or more, got None"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_of_a_watch(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(UsageError, match=message):
        watch(model, sgd(model), **options)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ([], "optimizer is an empty sequence"),
        ("twice", "the same SGD was given twice"),
        ("another", "SGD holds none of the parameters of this Linear: it was made for another"),
        ("another too", "SGD holds none of the parameters of this Linear"),
    ],
)
def test_optimizers_that_cannot_be_meant(optimizer: Any, message: str) -> None:
    model = net()
    own = sgd(model)
    given = {"twice": [own, own], "another": sgd(net()), "another too": [own, sgd(net())]}
    if isinstance(optimizer, str):
        optimizer = given[optimizer]
    with pytest.raises(UsageError, match=message):
        watch(model, optimizer)


@pytest.mark.parametrize("model", [nn.Linear, [1], None, net().parameters()])
def test_models_that_are_none(model: Any) -> None:
    for wrong in (
        lambda: watch(model),
        lambda: gradsight.check_gradient_health(model),
        lambda: gradsight.log_gradient_distribution(model, MetricsTracker(), 0),
    ):
        with pytest.raises(UsageError, match=r"model must be a torch.nn.Module, got"):
            wrong()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_step": 2.5}, "start_step must be a whole number of 0 or more, got 2.5"),
        ({"start_step": "a"}, "start_step must be a whole number of 0 or more, got 'a'"),
        ({"start_step": True}, "start_step must be a whole number of 0 or more, got True"),
        ({"end_step": 2.5}, "end_step must be a whole number of 0 or more, got 2.5"),
        ({"step_interval": 2.5}, "step_interval must be a whole number of 1 or more, got 2.5"),
        ({"step_interval": None}, "step_interval must be a whole number of 1 or more, got None"),
        ({"start_step": 4, "end_step": 3}, "end_step 3 lies before start_step 4"),
    ],
)
def test_schedules(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule(**arguments)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    every = Schedule(np.int64(0), np.int64(9), np.int64(2))
    train(net(), run_dir=tmp_path, stats=every, start_step=np.int64(4))
    assert [step.step for step in open_run(tmp_path).steps()] == [4, 5]


STEPS = [
    (Step(3), "got a Step; pass its number, which is its `.step`"),
    (2.5, "got 2.5"),
    ("3", "got '3'"),
    (10**30, r"below 2\*\*63"),
    (-1, "got -1"),
    (torch.tensor(0.5), "got Tensor"),
]


def by_hand(step: Any) -> None:
    model = net()
    with watch(model) as watched:
        model(torch.rand(4, 3)).sum().backward()
        watched.step(0)
        watched.step(step)


def as_tracker(step: Any) -> None:
    model = net()
    optimizer = sgd(model)
    with watch(model, optimizer) as watched:
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        watched.log_scalar("a", 1.0, step)


@pytest.mark.parametrize(("step", "message"), STEPS)
@pytest.mark.parametrize(
    "use",
    [
        by_hand,
        as_tracker,
        lambda step: gradsight.check_gradient_health(with_gradients(), step),
        lambda step: gradsight.log_gradient_distribution(with_gradients(), MetricsTracker(), step),
    ],
)
def test_steps_are_whole_numbers(use: Callable[[Any], None], step: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"step must be .*{message}"):
        use(step)


@pytest.mark.parametrize("ids", [5, "abc", None, [1.5], torch.tensor(3), torch.rand(3)])
def test_names_of_samples(ids: Any) -> None:
    model = net()
    with (
        pytest.raises(UsageError, match="sample ids must be"),
        watch(model, sgd(model)) as watched,
    ):
        watched.ids(ids)


@pytest.mark.parametrize("value", ["b", None, torch.ones(2), [1.0]])
def test_what_is_logged_is_one_number(value: Any) -> None:
    model = net()
    for log in ("log", "log_scalar"):
        with (
            pytest.raises(UsageError, match="loss must be a single number, got"),
            watch(model, sgd(model)) as watched,
        ):
            if log == "log":
                watched.log(loss=value)
            else:
                watched.log_scalar("loss", value, 0)


def test_a_count_that_is_not_the_watchs_is_kept_apart(tmp_path: Path) -> None:
    """Epochs logged as steps would stand among the steps of the run."""
    model = net()
    optimizer = sgd(model)
    with watch(model, optimizer, run_dir=tmp_path) as watched:
        for step in range(8):
            model(torch.rand(4, 3)).sum().backward()
            watched.log_scalar("before", float(step), step)
            optimizer.step()
            watched.log_scalar("after", float(step), step)
        with pytest.warns(
            GradsightWarning, match="under step 1, but the watch is at step 8.*Metri"
        ):
            gradsight.log_gradient_distribution(model, watched, 1)
    run = gradsight.open_run(tmp_path)
    for made in run.steps():
        assert made.scalars["before"] == made.scalars["after"] == made.step
        assert not any(name.endswith("/norm") for name in made.scalars)
    apart = [each for each in run.scalars() if each.source == "tracker"]
    assert {each.step for each in apart} == {1}
    assert {each.name for each in apart} >= {
        f"gradients/{name}/norm" for name, _ in model.named_parameters()
    }
    (problem,) = run.problems()
    assert (problem.key, problem.count) == ("other-steps", len(apart))


def test_a_closed_watch_says_that_it_is() -> None:
    model = net()
    train(model)
    watched = watch(model)
    with pytest.warns(GradsightWarning, match="no step was recorded"):
        watched.close()
    with pytest.warns(GradsightWarning, match="this watch is closed"):
        watched.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched.log(loss=1.0)


def test_a_look_without_gradients_says_so() -> None:
    with pytest.warns(GradsightWarning, match="no parameter has a gradient, so nothing is logged"):
        assert gradsight.log_gradient_distribution(net(), MetricsTracker(), 3) == {}
    with pytest.raises(UsageError, match="ReLU has no parameters"):
        gradsight.check_gradient_health(nn.ReLU())
    with pytest.raises(UsageError, match="tracker must be an object, got the class MetricsTra"):
        gradsight.log_gradient_distribution(with_gradients(), MetricsTracker, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 5, ""])
def test_no_run_to_open(path: Any) -> None:
    with pytest.raises(UsageError, match="run_dir must be a path"):
        open_run(path)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda tracker: MetricsTracker(5), "run_dir must be a path, such as .* got 5"),
        (lambda tracker: MetricsTracker(""), "run_dir must be a path, .* got an empty text"),
        (lambda tracker: tracker.log_scalar("a", 1.0, "x"), "step must be a whole number .*'x'"),
        (lambda tracker: tracker.log_scalar("a", 1.0, None), "step must be a whole number .*None"),
        (lambda tracker: tracker.log_scalar("a", 1.0, 2.5), "step must be a whole number .*2.5"),
        (lambda tracker: tracker.log_scalar("a", 1.0, Step(3)), "which is its `.step`"),
        (lambda tracker: tracker.log_scalar("a", "b", 1), "a must be a single number, got 'b'"),
        (lambda tracker: tracker.log_scalar("a", torch.ones(2), 1), "a must be a single number"),
        (lambda tracker: tracker.log_scalar(3, 1.0, 1), "name of a number must be text, got 3"),
        (lambda tracker: tracker.log_scalars([1], 1), "log_scalars takes {name: value}, got list"),
        (lambda tracker: tracker.log_histogram("a", [1], 1), "takes a histogram of .* got list"),
        (lambda tracker: tracker.log_epoch("1", a=1.0), "step must be a whole number .*'1'"),
    ],
)
def test_trackers(use: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    with MetricsTracker(tmp_path) as tracker, pytest.raises(UsageError, match=message):
        use(tracker)


def test_a_closed_tracker_says_that_it_is(tmp_path: Path) -> None:
    tracker = MetricsTracker(tmp_path)
    tracker.log_scalar("a", torch.tensor(1.0), 2.0)  # type: ignore[arg-type]
    tracker.close()
    with pytest.warns(GradsightWarning, match="this tracker is closed"):
        tracker.log_scalar("a", 1.0, 3)
    assert [(each.step, each.value) for each in open_run(tmp_path).scalars()] == [(2, 1.0)]


# Continuing a run.


def test_another_model_is_not_put_into_the_record_of_the_first(tmp_path: Path) -> None:
    train(net(), run_dir=tmp_path)
    config = (tmp_path / "config.json").read_text()
    with pytest.raises(
        UsageError, match=r"weight has the shape \(2, 5\), and \(2, 3\) there\. Giv"
    ):
        train(net(5), run_dir=tmp_path)
    other = nn.Sequential(net(), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"0.weight is not in it; .*; and 5 more\. Give this mod"):
        watch(other, sgd(other), run_dir=tmp_path, start_step=1)
    assert (tmp_path / "config.json").read_text() == config
    assert [step.step for step in open_run(tmp_path).steps()] == [0, 1]
    # What was refused leaves the run free, and a run that is replaced may be another model's.
    train(net(5), run_dir=tmp_path, start_step=0, steps=1)
    assert [step.step for step in open_run(tmp_path).steps()] == [0]


def test_continuing_an_old_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "first"
    train(net(), run_dir=run_dir)
    assert capsys.readouterr().err == ""
    train(net(), run_dir=run_dir)
    assert capsys.readouterr().err == f"gradsight: continuing {run_dir} after step 1\n"
    train(net(), run_dir=run_dir, start_step=2)
    said = f"gradsight: continuing {run_dir} after step 1: its steps 2 to 3 are replaced\n"
    assert capsys.readouterr().err == said
    train(net(), run_dir=run_dir, start_step=0)
    said = f"gradsight: recording {run_dir} anew: its steps 0 to 3 are replaced\n"
    assert capsys.readouterr().err == said
    train(net(), run_dir=run_dir, quiet=True)
    assert capsys.readouterr().err == ""
