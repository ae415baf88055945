"""W&B's own files are read back: a user's run is what it is without us, and ours has every step."""

import os
import random
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from torch import nn

import gradsight
import warm
from gradsight.errors import GradsightWarning
from gradsight.store.sinks.step_sink import StepRow
from gradsight.store.sinks.wandb import WandbSink
from store.wandb_file import WandbRun, history, runs

pytestmark = pytest.mark.usefixtures("offline")
STEPS = 12


def no_run(run: Any, step: int) -> None:
    """The user has a run and logs nothing to it."""


def without_step(run: Any, step: int) -> None:
    run.log({"loss": step / 2})


def by_optimizer_step(run: Any, step: int) -> None:
    run.log({"loss": step / 2}, step=step)


def by_the_next_step(run: Any, step: int) -> None:
    run.log({"loss": step / 2}, step=step + 1)


def by_epoch(run: Any, step: int) -> None:
    if step % 4 == 3:
        run.log({"epoch loss": step / 2}, step=step // 4)


def by_samples(run: Any, step: int) -> None:
    run.log({"loss": step / 2}, step=step * 64)


def several_times(run: Any, step: int) -> None:
    run.log({"loss": step / 2})
    run.log({"accuracy": step / 3, "lr": 0.5})


def several_times_by_step(run: Any, step: int) -> None:
    run.log({"loss": step / 2}, step=step)
    run.log({"accuracy": step / 3}, step=step)


def rows_left_open(run: Any, step: int) -> None:
    run.log({"loss": step / 2}, commit=False)
    if step % 3 == 2:
        run.log({"accuracy": step / 3})


def names_of_ours(run: Any, step: int) -> None:
    run.log({"gradients/total_norm": -1.0, "gradients/0.weight/norm": -2.0, "gradsight/step": -3})


WAYS = [
    no_run,
    without_step,
    by_optimizer_step,
    by_the_next_step,
    by_epoch,
    by_samples,
    several_times,
    several_times_by_step,
    rows_left_open,
    names_of_ours,
]


def train(log: Callable[[int], None], steps: int = STEPS, **options: Any) -> list[dict[str, float]]:
    """A watched loop that calls `log` after every step; the norms as the plainest loop sees them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = gradsight.Schedule(step_interval=3)
    norms = []
    with gradsight.watch(model, optimizer, sinks=["wandb"], histograms=every, **options) as watched:
        for step in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            named = model.named_parameters()
            norms.append({name: float(parameter.grad.norm()) for name, parameter in named})
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss, accuracy=0.5)
            log(step)
    return norms


def nothing(step: int) -> None:
    """A user who does not log."""


class Delivery:
    """Lets a loop wait until W&B has the steps before the last one.

    The last step itself stays with Gradsight until the next: more may be logged for it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._last = -1
        self._changed = threading.Condition()
        log_step = WandbSink.log_step

        def note(sink: WandbSink, row: StepRow) -> None:
            log_step(sink, row)
            with self._changed:
                self._last = row.step
                self._changed.notify_all()

        monkeypatch.setattr(WandbSink, "log_step", note)

    def wait_for(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._last >= step, timeout=100)


def check_ours(ours: WandbRun, norms: list[dict[str, float]], first: int = 0) -> None:
    """Every step once, under its own number, with all its numbers."""
    rows = ours.by_step()
    assert list(rows) == list(range(first, first + len(norms)))
    for step, expected in enumerate(norms, first):
        row = rows[step]
        found = {name: row[f"gradients/{name}/norm"] for name in expected}
        assert found == pytest.approx(expected, rel=1e-5)
        assert {"loss", "accuracy", "lr", "gradients/total_norm"} <= set(row)
        assert ("gradients/histogram" in row) == (step % 3 == 0)
    for names in ("gradients/*", "health/*", "memory/*", "*"):
        assert ours.over[names] == "gradsight/step"


def test_without_a_run_of_the_users(tmp_path: Path) -> None:
    norms = train(nothing, run_dir=tmp_path / "run")
    assert wandb.run is None
    (ours,) = runs(tmp_path / "run")
    check_ours(ours, norms)
    assert (ours.project, ours.name) == ("gradsight", "run")
    picture = ours.rows[3]["gradients/histogram"]
    assert picture["_type"] == "histogram"
    assert sum(picture["values"]) == pytest.approx(40)
    edges = picture["bins"]
    middle = [(low + high) / 2 for low, high in pairwise(edges)]
    assert middle[len(middle) // 2] == pytest.approx(0, abs=1e-9)
    assert 0 < ours.rows[3]["gradients/share_within_0.1"] <= 1
    assert ours.rows[3]["gradients/histogram_outside"] == 0
    assert all("gradients/0/norm" in row for row in ours.rows.values())
    assert "gradients/0.weight/histogram" in ours.rows[0]


def loop_alone(way: Callable[[Any, int], None], folder: Path) -> WandbRun:
    """The user's rows as they are without us."""
    with wandb.init(project="mine", group="sweepless", dir=folder) as run:
        for step in range(STEPS):
            way(run, step)
    (alone,) = runs(folder)
    return alone


def beside(
    tmp_path: Path, way: Callable[[Any, int], None], delivery: Delivery | None = None
) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "user").mkdir()
    alone = loop_alone(way, tmp_path / "alone")
    run = wandb.init(project="mine", group="sweepless", dir=tmp_path / "user")

    def log(step: int) -> None:
        assert wandb.run is run
        way(wandb, step)
        if delivery is not None:
            delivery.wait_for(step - 1)

    norms = train(log, run_dir=tmp_path / "run")
    assert wandb.run is run
    run.finish()
    (theirs,) = runs(tmp_path / "user")
    assert theirs.logged() == alone.logged()
    (ours,) = runs(tmp_path / "run")
    check_ours(ours, norms)
    assert (ours.project, ours.group) == (theirs.project, theirs.group)
    assert list(gradsight.open_run(tmp_path / "run").problems()) == []


FIRST_TIER = (no_run, by_optimizer_step, rows_left_open, names_of_ours)


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way in FIRST_TIER else pytest.mark.slow) for way in WAYS],
)
def test_beside_a_run_of_the_users(tmp_path: Path, way: Callable[[Any, int], None]) -> None:
    beside(tmp_path, way)


@pytest.mark.parametrize(
    "way",
    [
        by_optimizer_step,
        pytest.param(without_step, marks=pytest.mark.slow),
        pytest.param(by_epoch, marks=pytest.mark.slow),
        pytest.param(rows_left_open, marks=pytest.mark.slow),
    ],
)
def test_beside_a_run_of_the_users_in_a_slow_loop(
    tmp_path: Path, way: Callable[[Any, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step reaches W&B before the next one is made."""
    beside(tmp_path, way, Delivery(monkeypatch))


@pytest.mark.parametrize("opened_at", [0, 5])
def test_a_run_that_the_user_opens_later_is_theirs(tmp_path: Path, opened_at: int) -> None:
    """Also while ours is open: W&B would hand it out as the run that there is."""
    (tmp_path / "user").mkdir()

    def log(step: int) -> None:
        if step == opened_at:
            wandb.init(project="mine", dir=tmp_path / "user")
        if step >= opened_at:
            wandb.log({"loss": step})
        else:
            assert wandb.run is None

    norms = train(log, run_dir=tmp_path / "run")
    wandb.finish()
    (theirs,) = runs(tmp_path / "user")
    expected = {row: {"loss": step} for row, step in enumerate(range(opened_at, STEPS))}
    assert theirs.logged() == expected
    (ours,) = runs(tmp_path / "run")
    check_ours(ours, norms)


def test_opened_between_the_watch_and_its_first_step_ours_is_beside_it(tmp_path: Path) -> None:
    """As trainers do that open a run when training begins."""
    (tmp_path / "user").mkdir()
    model = nn.Linear(2, 2)
    with gradsight.watch(model, run_dir=tmp_path / "run", sinks=["wandb"]) as watched:
        run = wandb.init(project="mine", name="first", group="all", dir=tmp_path / "user")
        model(torch.ones(1, 2)).sum().backward()
        watched.step()
        assert wandb.run is run
    run.finish()
    (ours,) = runs(tmp_path / "run")
    assert (ours.project, ours.group, ours.name) == ("mine", "all", "first-gradsight")


def test_the_users_run_may_end_before_ours(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    wandb.init(project="mine", dir=tmp_path / "user")

    def log(step: int) -> None:
        if step < 6:
            wandb.log({"loss": step})
        if step == 6:
            wandb.finish()
        if step == 9:
            wandb.init(project="another", dir=tmp_path / "user")
            wandb.log({"loss": step})

    norms = train(log, run_dir=tmp_path / "run")
    wandb.finish()
    first, second = runs(tmp_path / "user")
    if first.project == "another":
        first, second = second, first
    assert first.logged() == {step: {"loss": step} for step in range(6)}
    assert second.logged() == {0: {"loss": 9}}
    (ours,) = runs(tmp_path / "run")
    check_ours(ours, norms)


def test_a_later_init_that_ends_previous_runs_does_not_end_ours(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()

    def log(step: int) -> None:
        if step in (2, 5):
            wandb.init(project="mine", dir=tmp_path / "user", reinit="finish_previous")

    norms = train(log, run_dir=tmp_path / "run")
    wandb.finish()
    (ours,) = runs(tmp_path / "run")
    check_ours(ours, norms)


def test_without_a_run_dir_ours_is_found_below_theirs(tmp_path: Path) -> None:
    run = wandb.init(project="mine", dir=tmp_path)
    latest = (tmp_path / "wandb" / "latest-run").resolve()
    norms = train(nothing)
    run.log({"mine": 1.0})
    run.finish()
    assert (tmp_path / "wandb" / "latest-run").resolve() == latest
    (ours,) = runs(tmp_path / "wandb" / "gradsight")
    check_ours(ours, norms)


def test_two_watches_have_a_run_each(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    watches = [
        gradsight.watch(model, run_dir=tmp_path / name, sinks=["wandb"])
        for model, name in zip(models, "ab", strict=True)
    ]
    for _ in range(4):
        for model, watched in zip(models, watches, strict=True):
            model(torch.ones(1, 2)).sum().backward()
            watched.step()
    for watched in watches:
        watched.close()
    for name in "ab":
        (ours,) = runs(tmp_path / name)
        assert list(ours.by_step()) == [0, 1, 2, 3]
        assert ours.name == name


def test_a_resumed_run_goes_on_in_steps_of_its_own(tmp_path: Path) -> None:
    first = train(nothing, steps=6, run_dir=tmp_path / "run")
    second = train(nothing, steps=6, run_dir=tmp_path / "run")
    found = sorted(runs(tmp_path / "run"), key=lambda run: min(run.by_step()))
    check_ours(found[0], first)
    check_ours(found[1], second, first=6)
    assert sorted(found[1].rows) == list(range(6, 12))


@pytest.mark.parametrize("variable", ["WANDB_SWEEP_ID", "WANDB_LAUNCH"])
def test_a_run_that_the_environment_names_stays_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Sweeps and launchers name the run to come: ours must neither take that name nor its id."""
    wandb.teardown()
    monkeypatch.setenv(variable, "true")
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    monkeypatch.setenv("WANDB_RESUME", "allow")
    (tmp_path / "user").mkdir()

    def log(step: int) -> None:
        if step == 3:
            run = wandb.init(dir=tmp_path / "user")
            assert run.id == "theirs"
            assert run.settings.resume == "allow"

    norms = train(log, run_dir=tmp_path / "run")
    wandb.finish()
    (theirs,) = runs(tmp_path / "user")
    (ours,) = runs(tmp_path / "run")
    check_ours(ours, norms)
    assert ours.id != theirs.id == "theirs"
    assert ours.sweep == ""


def test_a_user_who_has_switched_wandb_off_gets_no_run(tmp_path: Path) -> None:
    run = wandb.init(mode="disabled")
    train(nothing, run_dir=tmp_path / "run")
    assert wandb.run is run
    assert runs(tmp_path) == []


def test_training_and_randomness_are_left_alone(tmp_path: Path) -> None:
    random.seed(0)
    before = random.getstate()
    train(nothing, steps=2, run_dir=tmp_path / "run")
    assert random.getstate() == before


def test_numbers_under_a_count_of_the_callers_are_kept(tmp_path: Path) -> None:
    """A step that was passed, and one far ahead: W&B would drop the former."""
    model = nn.Linear(2, 2)
    with gradsight.watch(model, run_dir=tmp_path, sinks=["wandb"]) as watched:
        for step in range(30):
            model(torch.ones(1, 2)).sum().backward()
            watched.step()
            watched.log_scalar("memory/gb", float(step), step)
            if step % 10 == 9:
                watched.log_scalar("eval/loss", 0.5, step // 10)
                watched.log_scalar("tokens", 0.5, 1000 + step)
    rows = list(history(tmp_path).values())
    memory = {row["gradsight/step"]: row["memory/gb"] for row in rows if "memory/gb" in row}
    assert memory == {step: float(step) for step in range(30)}
    assert all("lr" in row or "gradients/total_norm" in row for row in rows if "memory/gb" in row)
    assert [row["gradsight/step"] for row in rows if "eval/loss" in row] == [0, 1, 2]
    assert [row["gradsight/step"] for row in rows if "tokens" in row] == [1009, 1019, 1029]


def test_a_tracker_has_a_run_of_its_own_beside_the_watchs(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with (
        gradsight.watch(model, run_dir=tmp_path / "run", sinks=["wandb"]) as watched,
        gradsight.MetricsTracker(tmp_path / "run", use_wandb=True) as tracker,
    ):
        for step in range(6):
            model(torch.ones(1, 2)).sum().backward()
            watched.step()
            if step % 3 == 2:
                gradsight.log_gradient_distribution(model, tracker, step // 3, log_histogram=True)
                tracker.log_epoch(step // 3, val_loss=0.5)
    by_name = {run.name: run for run in runs(tmp_path / "run")}
    tracked = by_name.pop("run-tracker").by_step()
    watched_rows = by_name.pop("run").by_step()
    assert not by_name
    assert list(watched_rows) == list(range(6))
    assert list(tracked) == [0, 1]
    for row in tracked.values():
        assert {"gradients/weight/norm", "gradients/histogram", "val_loss"} <= set(row)


def test_what_is_not_kept_is_counted_and_names_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's process is gone in the middle of the run."""
    delivery = Delivery(monkeypatch)

    def log(step: int) -> None:
        if step == 3:
            delivery.wait_for(2)
            wandb.teardown()

    with pytest.warns(GradsightWarning, match="the sink W&B failed and is switched off"):
        train(log, run_dir=tmp_path / "run")
    (problem,) = gradsight.open_run(tmp_path / "run").problems()
    assert problem.key == "sink-W&B"
    assert problem.count >= STEPS - 4
    assert len(list(gradsight.open_run(tmp_path / "run").steps())) == STEPS


def test_a_wandb_that_cannot_be_opened_is_a_problem_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    wandb.teardown()
    with pytest.warns(GradsightWarning, match="the sink W&B failed and is switched off"):
        train(nothing, run_dir=tmp_path / "run")
    (problem,) = gradsight.open_run(tmp_path / "run").problems()
    assert problem.count >= STEPS


@pytest.mark.slow
def test_huggingface_trainer_with_wandb(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.layer(x)[:, 0]
            return {"loss": (out - labels).square().mean(), "logits": out}

    torch.manual_seed(1)
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(24)]

    def run_trainer(folder: Path, watched: bool) -> None:
        folder.mkdir()
        os.chdir(folder)
        arguments = TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            logging_steps=2,
            report_to=["wandb"],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model=Model(), args=arguments, train_dataset=data)
        if not watched:
            trainer.train()
        else:
            optimizer = trainer.create_optimizer()
            place = folder / "run"
            with gradsight.watch(trainer.model, optimizer, run_dir=place, sinks=["wandb"]):
                trainer.train()
        wandb.finish()
        wandb.teardown()  # the folder of runs is settled once for each set-up

    def told(run: WandbRun) -> dict[int, dict[str, Any]]:
        """HF's numbers, without those that are times."""
        timed = ("runtime", "per_second")
        return {
            step: {name: value for name, value in row.items() if not name.endswith(timed)}
            for step, row in run.logged().items()
        }

    run_trainer(tmp_path / "alone", watched=False)
    run_trainer(tmp_path / "beside", watched=True)
    (alone,) = runs(tmp_path / "alone")
    (theirs,) = runs(tmp_path / "beside" / "wandb")
    assert any("train/loss" in row for row in told(theirs).values())
    assert told(theirs) == told(alone)
    (ours,) = runs(tmp_path / "beside" / "run")
    assert list(ours.by_step()) == list(range(STEPS))
    assert ours.project == theirs.project


def test_a_script_that_closes_nothing_loses_nothing(tmp_path: Path) -> None:
    """The process ends while everything is open: W&B's own end must come after ours."""
    script = """
import sys, torch, wandb, gradsight
from torch import nn
model = nn.Linear(2, 2)
watched = gradsight.watch(model, run_dir="run", sinks=["wandb"])
tracker = gradsight.MetricsTracker("tracked", use_wandb=True)
run = wandb.init(project="mine", dir="user")
for step in range(40):
    model(torch.ones(1, 2)).sum().backward()
    watched.step(loss=float(step))
    tracker.log_scalar("epoch", float(step), step)
    wandb.log({"loss": step})
"""
    (tmp_path / "user").mkdir()
    warm.run(["-c", script], check=True, cwd=tmp_path, timeout=200)
    (ours,) = runs(tmp_path / "run")
    assert {step: row["loss"] for step, row in ours.by_step().items()} == {
        step: float(step) for step in range(40)
    }
    (tracked,) = runs(tmp_path / "tracked")
    assert list(tracked.by_step()) == list(range(40))
    (theirs,) = runs(tmp_path / "user")
    assert theirs.logged() == {step: {"loss": step} for step in range(40)}
    assert list(gradsight.open_run("run").problems()) == []
