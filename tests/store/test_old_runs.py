"""Runs that version 0.1 wrote: in WAL mode, without checksums. They stay readable, and go on.

old_runs/ has one that was closed, and one that was killed with frames in its write-ahead log and in
its tail; both were made by the code of that version.
"""

import sqlite3
import tarfile
from pathlib import Path

import pytest

from gradsight import MetricsTracker, open_run
from gradsight.core import rundir
from gradsight.errors import RunError
from gradsight.store.store import open_store
from gradsight.values.steps import Step

FIXTURES = Path(__file__).parent / "old_runs"


def unpack(kind: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{kind}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / kind


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("kind", ["closed", "killed"])
def test_they_are_read_and_left_alone(kind: str, tmp_path: Path) -> None:
    run_dir = unpack(kind, tmp_path)
    before = contents(run_dir)
    run = open_run(run_dir)
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(20))
    assert [steps[3].loss, steps[4].loss] == [7.0, 1.0]
    assert steps[10].scalars == {"accuracy": 0.5}
    assert [stat.l2 for stat in run.parameter_stats("a.weight")] == [n + 0.5 for n in range(20)]
    assert [finding.code for finding in run.findings()] == ["GS103"]
    assert [histogram.step for histogram in run.histograms()] == [5]
    assert [scalar.name for scalar in run.scalars() if scalar.source == "tracker"] == ["epoch"]
    assert [each["name"] for each in run.config["parameters"]] == ["a.weight", "a.bias"]
    assert contents(run_dir) == before


@pytest.mark.parametrize("kind", ["closed", "killed"])
def test_they_go_on_as_new_ones(kind: str, tmp_path: Path) -> None:
    run_dir = unpack(kind, tmp_path)
    store = open_store(run_dir)
    assert store.next_step() == 20
    store.add_step(Step(20, 1.0), [])
    assert [step.step for step in open_run(run_dir).steps()] == list(range(21))
    store.close()
    assert [step.step for step in open_run(run_dir).steps()] == list(range(21))
    assert len(list(open_run(run_dir).parameter_stats())) == 40
    names = {file.name for file in run_dir.iterdir()}
    assert names == {rundir.RECORD, rundir.TAIL, rundir.CONFIG}
    data = bytearray((run_dir / rundir.RECORD).read_bytes())
    data[-1] ^= 1
    (run_dir / rundir.RECORD).write_bytes(data)
    with pytest.raises(RunError, match="damaged: its bytes do not fit its checksum"):
        open_run(run_dir)


def test_a_record_without_a_table_for_trackers(tmp_path: Path) -> None:
    """The very first ones had none."""
    run_dir = unpack("closed", tmp_path)
    record = sqlite3.connect(run_dir / rundir.RECORD)
    record.execute("DROP TABLE tracked")
    record.commit()
    record.close()
    assert {scalar.source for scalar in open_run(run_dir).scalars()} == {"watch"}
    with MetricsTracker(run_dir) as tracker:
        tracker.log_scalar("accuracy", 0.9, 0)
    assert [scalar.value for scalar in open_run(run_dir).scalars("accuracy")][:2] == [0.0, 0.9]
    assert next(open_run(run_dir).steps()).scalars == {"accuracy": 0.0}


def test_a_new_record_is_not_taken_for_an_old_one(tmp_path: Path) -> None:
    """Its checksum is compared as long as anything says that it has one."""
    store = open_store(tmp_path)
    store.add_step(Step(0, 1.0), [])
    store.close()
    whole = (tmp_path / rundir.RECORD).read_bytes()
    for first, last, value in ((60, 64, b"\0"), (68, 72, b"\0"), (18, 20, b"\2")):
        damaged = whole[:first] + value * (last - first) + whole[last:]
        assert damaged != whole
        (tmp_path / rundir.RECORD).write_bytes(damaged)
        with pytest.raises(RunError, match="damaged"):
            open_run(tmp_path)
