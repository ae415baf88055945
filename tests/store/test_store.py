"""The record survives what happens to files and processes."""

import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest

import warm
from gradsight import GradsightError, open_run
from gradsight.cli import main
from gradsight.core import rundir
from gradsight.errors import GradsightWarning, RunError, UsageError
from gradsight.store import tail_format as frames
from gradsight.store.store import open_store
from gradsight.values.histograms import Histogram
from gradsight.values.steps import Step

NAMES = ["a.weight", "a.bias"]


def step(number: int, **more: object) -> Step:
    return Step(step=number, time=1.0 + number, **more)  # type: ignore[arg-type]


def packed(*norms: float) -> bytes:
    values = np.array(norms)
    return frames.pack_statistics(None, {"l2": values, "max_abs": values / 2})


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    nan = float("nan")
    written = [
        step(0, loss=2.5, lr=0.1, total_norm=5.0, clip_coef=0.2, scale=1024.0, gradient="true"),
        step(1, loss=nan, total_norm=float("inf"), skipped=True, gradient="at the optimizer"),
        step(2, scalars={"accuracy": 0.5, "ärger/☃": nan}),
    ]
    for each in written:
        store.add_step(each, NAMES, packed(3.0, 4.0))
    store.add_step_scalars(2, {"loss": 7.0, "extra": 1.0})
    store.close()
    read = list(open_run(tmp_path).steps())
    assert read[0] == written[0]
    assert np.isnan(read[1].loss or 0.0)
    assert (read[1].total_norm, read[1].skipped, read[1].gradient, read[1].lr) == (
        float("inf"),
        True,
        "at the optimizer",
        None,
    )
    assert read[2].loss == 7.0
    assert read[2].scalars["accuracy"] == 0.5
    assert np.isnan(read[2].scalars["ärger/☃"])
    stats = list(open_run(tmp_path).parameter_stats())
    assert [
        (stat.step, stat.parameter, stat.l2, stat.max_abs, stat.nan, stat.inf) for stat in stats[:2]
    ] == [
        (0, "a.weight", 3.0, 1.5, 0, 0),
        (0, "a.bias", 4.0, 2.0, 0, 0),
    ]
    assert {stat.parameter for stat in open_run(tmp_path).parameter_stats("a.bias")} == {"a.bias"}


def test_a_name_that_the_run_does_not_know(tmp_path: Path) -> None:
    """Nothing in silence would read as a parameter without any gradient."""
    store = open_store(tmp_path)
    store.add_step(step(0), NAMES, packed(3.0, 4.0))
    counted = Histogram(0, "attention map", -3, (1.0,), (2.0,), 4.0, 0.0, 0.0, 0.0, 7, 7)
    store.add_histograms(0, [counted], source="mine")
    store.close()
    run = open_run(tmp_path)
    with pytest.raises(UsageError, match=r"no parameter named 'a.wieght'; nearest: a.weight"):
        run.parameter_stats("a.wieght")
    with pytest.raises(UsageError, match=r"no parameter named 'a.weight'; it has attention map"):
        run.histograms("a.weight")
    assert [each.parameter for each in run.histograms("attention map")] == ["attention map"]


def test_names_that_no_settings_know_stand_as_they_were_measured(tmp_path: Path) -> None:
    names = [f"layers.{number}" for number in (0, 2, 10)]
    store = open_store(tmp_path)
    store.add_step(step(0), names, packed(1.0, 2.0, 3.0))
    store.close()
    assert open_run(tmp_path).measured_parameters() == names


def test_unknown_counts_and_some_rows_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    columns = {
        name: np.array([value])
        for name, value in {"l2": 1.0, "max_abs": 2.0, "nan": -1.0, "inf": 3.0}.items()
    }
    store.add_step(step(0), NAMES, frames.pack_statistics([1], columns))
    store.close()
    (stat,) = open_run(tmp_path).parameter_stats()
    assert (stat.parameter, stat.nan, stat.inf, stat.update_ratio) == ("a.bias", None, 3, None)
    table = open_run(tmp_path).to_arrow("parameter_stats").to_pylist()
    expected = {"step": 0, "parameter": "a.bias", "l2": 1.0, "max_abs": 2.0, "nan": None, "inf": 3}
    details = ("update_ratio", "update_ratio_error", "weight_rms", "update_rms")
    assert table == [expected | dict.fromkeys(details)]


def test_tables_have_the_columns_of_the_records(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add_step(step(0, loss=1.0, scalars={"x": 2.0}), NAMES, packed(1.0, 2.0))
    histogram = Histogram(
        0, None, -3, (1.0,), (2.0,), zero=1, nan=0, inf=0, underflow=0, size=4, sampled=4
    )
    store.add_histograms(0, [histogram])
    store.add_scalars(0, {"memory/rss_gb": 1.5})
    store.close()
    run = open_run(tmp_path)
    assert list(run.histograms()) == [histogram]
    assert [scalar.name for scalar in run.memory()] == ["memory/rss_gb"]
    for name, rows in [
        ("steps", run.steps()),
        ("histograms", run.histograms()),
        ("parameter_stats", run.parameter_stats()),
    ]:
        records = list(rows)
        table = run.to_arrow(name)
        assert table.num_rows == len(records)
        assert table.column_names == list(type(records[0]).__dataclass_fields__)
    for name in ("findings", "scores", "incidents", "problems", "memory", "scalars"):
        assert run.to_arrow(name).num_rows == len(list(getattr(run, name)()))
    with pytest.raises(
        UsageError, match="no table 'stepz'; it has expert_stats, findings, histograms"
    ):
        run.to_arrow("stepz")


WRITER = """
import sys
import numpy as np
from gradsight.store import tail_format as frames
from gradsight.store.store import open_store
from gradsight.values.steps import Step
store = open_store(sys.argv[1])
steps_between_publishing = int(sys.argv[2])
values = np.ones(150)
names = [f"layer.{i}" for i in range(150)]
for number in range(10**9):
    packed = frames.pack_statistics(None, {"l2": values, "max_abs": values})
    store.add_step(Step(step=number, time=1.0), names, packed)
    print(number, flush=True)
    if steps_between_publishing and number % steps_between_publishing == 0:
        with store._tending:
            store._publish()
"""


@pytest.mark.parametrize("attempt", range(6))
def test_kill_9_loses_at_most_the_last_two_steps(attempt: int, tmp_path: Path) -> None:
    """Every second writer publishes its record every five steps; the others leave it to its thread.

    Each is killed after a random number of steps, wherever it is just then.
    """
    arguments = [tmp_path, 5 * (attempt % 2)]
    with warm.Popen(["-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(random.Random(attempt).randrange(1, 500))]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
    # The kill may have cut the last line short.
    last = int([line for line in lines if line.endswith("\n")][-1])
    recorded = [each.step for each in open_run(tmp_path).steps()]
    assert recorded == list(range(len(recorded)))
    assert len(recorded) >= last - 1
    assert len(list(open_run(tmp_path).parameter_stats("layer.7"))) == len(recorded)


WRITER_BY_HAND = """
import sys
from core.hand_clock import HandClock
from gradsight.store.store import open_store
from gradsight.values.steps import Step
store = open_store(sys.argv[1], HandClock())
print("open", flush=True)
number = 0
for line in sys.stdin:
    if line == "step\\n":
        store.add_step(Step(step=number, time=1.0), [])
        number += 1
    elif line == "loss\\n":
        store.add_step_scalars(0, {"loss": 7.0, "late": 1.0})
    else:
        store._publish()
    print("done", flush=True)
"""


def test_a_reader_sees_a_run_that_is_being_written(tmp_path: Path) -> None:
    """At once, and whether a step is in the record, in the tail, or in both by turns."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with warm.Popen(
        ["-c", WRITER_BY_HAND, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as writer:

        def ask(what: str) -> None:
            assert writer.stdin is not None
            assert writer.stdout is not None
            print(what, file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "done\n"

        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        run = open_run(tmp_path)
        assert not run.refresh()
        ask("step")
        assert run.refresh()
        assert len(list(run.steps())) == 1
        ask("publish")
        ask("step")
        begun = run.steps()
        assert next(begun).step == 0
        ask("publish")
        ask("step")
        assert [each.step for each in run.steps()] == [0, 1, 2]
        # Whoever began to read goes on with what there was.
        assert [each.step for each in begun] == [1]
        # A loss that is logged late changes a step that is in the record.
        ask("loss")
        assert [each.loss for each in run.steps()] == [7.0, None, None]
        assert next(run.steps()).scalars == {"late": 1.0}
        assert [each.step for each in run.steps(after=1)] == [2]
        writer.kill()
    assert [each.loss for each in open_run(tmp_path).steps()] == [7.0, None, None]


def test_two_processes_cannot_record_into_one_run(tmp_path: Path) -> None:
    with warm.Popen(["-c", WRITER, tmp_path, 0], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(RunError, match="another process is recording into"):
            open_store(tmp_path)
        writer.kill()


@pytest.mark.parametrize("damage", ["nonsense", "header", "middle", "truncated", "other"])
def test_a_damaged_file_is_reported(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path)
    for number in range(3000):
        store.add_step(step(number), NAMES, packed(1.0, 2.0))
    store.close()
    file = tmp_path / rundir.RECORD
    data = bytearray(file.read_bytes())
    if damage == "nonsense":
        data = bytearray(b"this is not a database" * 100)
    elif damage == "header":
        data[:32] = os.urandom(32)
    elif damage == "middle":
        data[16384 * 3 :] = os.urandom(len(data) - 16384 * 3)
    elif damage == "truncated":
        del data[16384 * 3 + 7 :]
    else:
        file.unlink()
        sqlite3.connect(file).execute("CREATE TABLE recipes (name)")
        data = bytearray(file.read_bytes())
    file.write_bytes(data)
    with pytest.raises(GradsightError, match=r"damaged|is not the record|not the record of a run"):
        list(open_run(tmp_path).steps()) + list(open_run(tmp_path).parameter_stats())
    # A database that was never a run is a wrong path.
    assert main(["report", str(tmp_path)]) == (64 if damage == "other" else 2)
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert "gradsight: " in printed


def test_a_full_disk_loses_nothing_that_fits_memory(tmp_path: Path) -> None:
    """Files may not grow beyond a limit for a while; what was handed over meanwhile is written
    afterwards.
    """
    store = open_store(tmp_path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        with pytest.warns(GradsightWarning, match="cannot be written"):
            for number in range(4000):
                store.add_step(step(number), NAMES, packed(1.0, 2.0))
                if number % 400 == 0:
                    store.flush()
            store.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.flush()
    store.close()
    assert len(list(open_run(tmp_path).steps())) == 4000


def test_a_long_run_is_small_and_opens_at_once(tmp_path: Path) -> None:
    """150 parameters x 4 statistics, 4,000 steps here: 100,000 must stay below 300 MB."""
    store = open_store(tmp_path)
    names = [f"transformer.h.{i // 12}.part.{i % 12}.weight" for i in range(150)]
    generator = np.random.default_rng(0)
    for number in range(4000):
        columns = {name: generator.random(150) for name in frames.COLUMNS[:4]}
        store.add_step(
            step(number, loss=1.0, lr=0.1, total_norm=1.0),
            names,
            frames.pack_statistics(None, columns),
        )
    store.close()
    assert (tmp_path / rundir.RECORD).stat().st_size / 4000 * 100_000 < 300e6
    assert sum(1 for _ in open_run(tmp_path).steps()) == 4000


def test_forgetting_steps(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(10):
        store.add_step(step(number, scalars={"x": 1.0}), NAMES, packed(1.0, 2.0))
    store.forget_from(6)
    assert store.next_step() == 6
    store.close()
    run = open_run(tmp_path)
    assert [each.step for each in run.steps()] == list(range(6))
    assert max(scalar.step for scalar in run.scalars()) == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing", "there is no run directory at"), (".", "it has no run.sqlite")],
)
def test_opening_what_is_no_run(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=message):
        open_run(tmp_path / path)


def test_a_broken_config_is_reported(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    for text, message in (
        ("{", "cannot be read"),
        ("[1]", "should hold a JSON object, but holds a list"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RunError, match=message):
            _ = open_run(tmp_path).config


def test_the_order_of_packed_numbers_is_the_formats() -> None:
    """They are taken from the records' fields: a new one may only come last."""
    assert frames.COLUMNS == (
        "l2",
        "max_abs",
        "nan",
        "inf",
        "update_ratio",
        "update_ratio_error",
        "weight_rms",
        "update_rms",
    )
    assert len(frames.COLUMNS) <= 8, "the mask of columns has eight bits"
    assert {"nan", "inf"} == frames.COUNTS
    assert {"update_ratio", "update_ratio_error"} <= frames.OPTIONAL
    counts = Histogram(3, "a", -3, (1.0,), (2.0,), 4.0, 5.0, 6.0, 7.0, 8, 9)
    payload = frames.pack_histograms(3, "", [counts])
    row = ["a", -3, [1.0], [2.0], 4.0, 5.0, 6.0, 7.0, 8, 9]
    assert json.loads(zlib.decompress(frames.unpack_histogram_step(payload)[2])) == [row]
