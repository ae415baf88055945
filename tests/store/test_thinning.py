"""A record that may take so many bytes: old steps by minimum and maximum, the rest as it was."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradsight import open_run, watch
from gradsight.cli import main
from gradsight.core import rundir
from gradsight.errors import UsageError
from gradsight.store import tail_format as frames
from gradsight.store.store import Store, open_store
from gradsight.store.thinning import NEAR
from gradsight.values.findings import Finding
from gradsight.values.steps import THINNED, THINNED_HIGH, THINNED_LOW, Step

NAMES = [f"block.{number}.weight" for number in range(150)]
MOST = 1_500_000
STEPS = 6000
SPIKE = 1234
DIP = 2345
NAN = 345
FINDING = 1800


def norms_at(step: int) -> Any:
    norms = 1.0 + 0.1 * np.sin(step / 7 + np.arange(len(NAMES)))
    if step == SPIKE:
        norms[3] = 77.0
    if step == DIP:
        norms[4] = 1e-5
    if step == NAN:
        norms[5] = math.nan
    return norms


def add(store: Store, steps: range) -> None:
    for number in steps:
        norms = norms_at(number)
        packed = frames.pack_statistics(None, {"l2": norms, "max_abs": norms / 2})
        step = Step(number, 1e9 + number, loss=2.0 + (number == SPIKE), scalars={"x": number})
        store.add_step(step, NAMES, packed)


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that would take five times as much as it may."""
    folder = tmp_path_factory.mktemp("thinned")
    store = open_store(folder)
    store.limit(MOST)
    found = Finding("GS201", "spike", "warning", (NAMES[0],), FINDING, "e", "m", "r", "f")
    for start in range(0, STEPS, 500):
        add(store, range(start, start + 500))
        if start <= FINDING < start + 500:
            store.add_finding(found)
        store._tend()
    store.close()
    return folder


def test_it_takes_no_more_than_it_may(thinned: Path) -> None:
    files = [thinned / rundir.RECORD, thinned / rundir.TAIL]
    assert sum(file.stat().st_size for file in files) <= MOST
    assert main(["verify", str(thinned)]) == 0


def test_every_step_is_there_or_stands_for_by_its_neighbours(thinned: Path) -> None:
    steps = list(open_run(thinned).steps())
    assert (steps[0].step, steps[-1].step) == (0, STEPS - 1)
    kinds = [step.gradient for step in steps]
    assert kinds.count(THINNED_LOW) == kinds.count(THINNED_HIGH) > 10
    for one, other in pairwise(steps):
        if one.gradient == THINNED_LOW:
            assert other.gradient == THINNED_HIGH
        else:
            assert other.step == one.step + 1
    newest = [step for step in steps if step.step > STEPS - 100]
    assert {step.gradient for step in newest} == {"true"}


def test_what_is_near_a_finding_is_as_it_was(thinned: Path) -> None:
    near = range(FINDING - NEAR, FINDING + NEAR + 1)
    stats = {}
    for stat in open_run(thinned).parameter_stats():
        stats.setdefault(stat.step, []).append(stat.l2)
    for step in near:
        np.testing.assert_allclose(stats[step], norms_at(step), rtol=1e-6)
    kinds = {step.step: step.gradient for step in open_run(thinned).steps()}
    assert {kinds[step] for step in near} == {"true"}


def test_the_extremes_survive(thinned: Path) -> None:
    run = open_run(thinned)
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    broken = []
    for stat in run.parameter_stats():
        if math.isnan(stat.l2):
            broken.append(stat.parameter)
            continue
        low[stat.parameter] = min(stat.l2, low.get(stat.parameter, math.inf))
        high[stat.parameter] = max(stat.l2, high.get(stat.parameter, 0.0))
    whole = np.array([norms_at(step) for step in range(STEPS)])
    np.testing.assert_allclose([low[name] for name in NAMES], np.nanmin(whole, axis=0), rtol=1e-6)
    np.testing.assert_allclose([high[name] for name in NAMES], np.nanmax(whole, axis=0), rtol=1e-6)
    assert broken == [NAMES[5]]
    assert max(step.loss or 0 for step in run.steps()) == 3.0


def test_each_pair_is_the_extremes_of_its_steps(thinned: Path) -> None:
    run = open_run(thinned)
    steps = list(run.steps())
    stats: dict[int, list[float]] = {}
    for stat in run.parameter_stats():
        stats.setdefault(stat.step, []).append(stat.l2)
    for one, other in pairwise(steps):
        if one.gradient != THINNED_LOW:
            continue
        covered = np.array([norms_at(step) for step in range(one.step, other.step + 1)])
        np.testing.assert_allclose(stats[one.step], np.nanmin(covered, axis=0), rtol=1e-6)
        np.testing.assert_allclose(stats[other.step], covered.max(axis=0), rtol=1e-6)
        assert (one.scalars["x"], other.scalars["x"]) == (one.step, other.step)
        assert one.time == 1e9 + one.step


def test_the_older_the_coarser(thinned: Path) -> None:
    steps = list(open_run(thinned).steps())
    lengths = []
    for one, other in pairwise(steps):
        if one.gradient == THINNED_LOW:
            lengths.append(other.step - one.step + 1)
    # Leftovers before what is kept around the finding are too few to be put together.
    assert lengths[0] == max(lengths) > lengths[-1] == min(lengths)


def test_a_report_and_a_comparison_of_it(
    thinned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = tmp_path / "whole"
    store = open_store(whole)
    add(store, range(STEPS))
    store.close()
    assert main(["compare", str(thinned), str(whole)]) == 0
    assert main(["report", str(thinned)]) == 1
    assert THINNED.strip() in (thinned / rundir.PAGE).read_text()


def test_a_watch_with_a_limit(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with watch(model, optimizer, run_dir=tmp_path, max_bytes="500KB", quiet=True, health=False):
        for _ in range(50):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    run = open_run(tmp_path)
    assert run.next_step() == 50
    assert run.config["settings"]["watch"]["max_bytes"] == 500_000


@pytest.mark.parametrize("size", [0, 1000, "1KB", "much", True, -5])
def test_a_limit_that_makes_no_sense(size: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        watch(torch.nn.Linear(1, 1), run_dir=tmp_path, max_bytes=size)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
