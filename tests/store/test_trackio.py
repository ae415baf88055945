"""Trackio's own database is read back, from scripts: where it is is settled at the import."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import gradsight
import warm

STEPS = 8

WATCHED = f"""
import sys, time, torch, gradsight
from torch import nn

def train(log, run_dir="run", **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    every = gradsight.Schedule(step_interval=3)
    opened = gradsight.watch(model, run_dir=run_dir, sinks=["trackio"], histograms=every, **options)
    with opened as watched:
        for step in range({STEPS}):
            model(torch.randn(8, 4)).square().mean().backward()
            watched.step()
            watched.log(loss=float(step))
            log(step)
"""


def run_script(folder: Path, script: str, before: str = WATCHED) -> None:
    """Run a script in a folder, with Trackio's database in it."""
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "database"), "HF_HUB_OFFLINE": "1"}
    done = warm.run(
        ["-c", before + script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def rows(folder: Path, project: str) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """What a project holds, by the run's name, in the order in which it came."""
    database = sqlite3.connect(folder / "database" / f"{project}.db")
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    query = "SELECT run_name, step, metrics FROM metrics ORDER BY id"
    for name, step, metrics in database.execute(query):
        found.setdefault(name, []).append((step, json.loads(metrics)))
    database.close()
    return found


def check_ours(ours: list[tuple[int, dict[str, Any]]], run_dir: Path, first: int = 0) -> None:
    """Every step once, with the record's numbers."""
    assert [step for step, _ in ours] == list(range(first, first + STEPS))
    recorded = {step.step: step for step in gradsight.open_run(run_dir).steps()}
    for step, row in ours:
        assert row["gradients/total_norm"] == pytest.approx(recorded[step].total_norm)
        assert row["loss"] == recorded[step].loss
        assert {"gradients/weight/norm", "gradients/bias/norm"} <= set(row)
        assert ("gradients/histogram" in row) == (step % 3 == 0)
    assert list(gradsight.open_run(run_dir).problems()) == []


def test_without_a_run_of_the_users_and_resumed(tmp_path: Path) -> None:
    run_script(tmp_path, "train(lambda step: None)\ntrain(lambda step: None, quiet=True)\n")
    (found,) = rows(tmp_path, "gradsight").items()
    name, ours = found
    assert name == "run"
    assert [step for step, _ in ours] == list(range(2 * STEPS))
    check_ours(ours[:STEPS], tmp_path / "run")
    check_ours(ours[STEPS:], tmp_path / "run", first=STEPS)
    assert ours[3][1]["gradients/histogram"]["_type"] == "trackio.histogram"
    assert ours[3][1]["gradients/histogram_outside"] == 0


QUIET = "embed=False, auto_log_cpu=False, auto_log_gpu=False"


def test_a_run_of_the_users_goes_on_before_during_and_after(tmp_path: Path) -> None:
    script = f"""
import trackio
run = trackio.init(project="mine", name="first", group="all", config={{"lr": 1}}, {QUIET})
config = trackio.config
trackio.log({{"loss": -1.0}})

def log(step):
    assert trackio.context_vars.current_run.get() is run
    assert trackio.context_vars.current_project.get() == "mine"
    trackio.log({{"loss": step / 2, "gradients/total_norm": -1.0}})
    trackio.log({{"loss": step / 2}}, step=1000 + step)

train(log)
assert trackio.context_vars.current_run.get() is run
assert trackio.config is config
trackio.log({{"loss": 99.0}})
trackio.finish()
"""
    alone = script.replace("train(log)", f"[log(step) for step in range({STEPS})]")
    for name in ("alone", "beside"):
        (tmp_path / name).mkdir()
    run_script(tmp_path / "alone", alone, before="")
    run_script(tmp_path / "beside", script)
    without = rows(tmp_path / "alone", "mine")
    found = rows(tmp_path / "beside", "mine")
    assert found["first"] == without["first"]
    assert set(found) == {"first", "first-gradsight"}
    check_ours(found["first-gradsight"], tmp_path / "beside" / "run")


def test_a_run_that_the_user_opens_or_ends_meanwhile_is_theirs(tmp_path: Path) -> None:
    script = f"""
import trackio

def log(step):
    if step == 2:
        trackio.init(project="mine", name="first", {QUIET})
    if 2 <= step < 5:
        trackio.log({{"loss": step / 2}})
    if step == 5:
        trackio.finish()
        trackio.init(project="another", name="second", {QUIET})
        trackio.log({{"loss": step / 2}})

train(log)
trackio.log({{"loss": 99.0}})
"""
    run_script(tmp_path, script)
    assert rows(tmp_path, "mine") == {
        "first": [(0, {"loss": 1.0}), (1, {"loss": 1.5}), (2, {"loss": 2.0})]
    }
    assert rows(tmp_path, "another") == {"second": [(0, {"loss": 2.5}), (1, {"loss": 99.0})]}
    (ours,) = rows(tmp_path, "gradsight").values()
    check_ours(ours, tmp_path / "run")


def test_a_script_that_closes_nothing_loses_nothing(tmp_path: Path) -> None:
    script = f"""
import trackio
model = nn.Linear(2, 2)
watched = gradsight.watch(model, run_dir="run", sinks=["trackio"])
trackio.init(project="mine", name="first", {QUIET})
for step in range(30):
    model(torch.ones(1, 2)).sum().backward()
    watched.step(loss=float(step))
    trackio.log({{"loss": step}})
"""
    run_script(tmp_path, script)
    found = rows(tmp_path, "mine")
    assert [row["loss"] for _, row in found["first"]] == list(range(30))
    ours = {step: row["loss"] for step, row in found["first-gradsight"]}
    assert ours == {step: float(step) for step in range(30)}
