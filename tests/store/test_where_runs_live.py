"""Runs on disks that are full, read-only, without locks, or gone; with and without kills."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsight
import warm
from core.hand_clock import HandClock
from gradsight import open_run
from gradsight.core import file_locks, rundir
from gradsight.errors import GradsightWarning, RunError, WrongPlace
from gradsight.store import store as store_module
from gradsight.store.store import Store, open_store
from gradsight.values.steps import Step
from store import kills
from store.crafted import everything, fill, small_run

PATHS = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return warm.run(
        ["-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PATHS},
    )


def steps_in(run_dir: Path) -> list[int]:
    return [step.step for step in open_run(run_dir).steps()]


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_kill_9_while_it_opens_and_publishes() -> None:
    """A few tries; `python tests/store/kills.py` makes hundreds."""
    results = kills.campaign(tries=12, seed=1, longest=0.02)
    assert not [result for result in results if result.startswith("FAILED")], results
    assert results["read"], results


READER = """
import os, sys
from pathlib import Path
import pyarrow, pyarrow.parquet
from store.crafted import everything
from gradsight.cli.verify import verify
everything(Path(sys.argv[1]))  # what is imported then may lie where that user may not look
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert not os.access(sys.argv[1], os.W_OK)
found = everything(Path(sys.argv[1]))
print(len(found["steps"]), len(found["parameter_stats"]), verify(Path(sys.argv[1])))
"""


@pytest.fixture
def visible() -> Iterator[Path]:
    """A folder that other users may look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def test_a_reader_without_leave_to_write(visible: Path) -> None:
    """Of a live run, a killed one and a closed one, as another user: root may write anything."""
    run_dir = small_run(visible / "run")
    store = open_store(run_dir)
    fill(store, [5, 6])
    killed = shutil.copytree(run_dir, visible / "killed")
    for place, expected in ((run_dir, 7), (killed, 7)):
        before = {file.name: file.read_bytes() for file in place.iterdir()}
        done = run_python(READER, place)
        said = done.stdout.splitlines()[-1:]
        assert said == [f"{expected} {2 * expected} 0"], done.stdout + done.stderr
        assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    store.close()
    assert run_python(READER, run_dir).stdout.splitlines()[-1] == "7 14 0"
    visible.chmod(0o700)
    said = run_python(READER.replace("assert", "# "), run_dir).stderr.splitlines()[-1]
    assert said.startswith("gradsight.errors.WrongPlace: "), said


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some NFS and Lustre are mounted; SQLite's own locks fail there too."""
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(GradsightWarning, match="a file system without locks"):
        store = open_store(tmp_path)
    fill(store, range(3))
    assert steps_in(tmp_path) == [0, 1, 2]
    store.close()
    assert steps_in(tmp_path) == [0, 1, 2]
    assert [problem.key for problem in open_run(tmp_path).problems()] == ["store-lock"]


def test_other_faults_of_locking_are_no_missing_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="broken"):
        file_locks.lock_alone(0)


def test_a_disk_that_is_full_when_the_run_opens(tmp_path: Path) -> None:
    """It is said, what comes is kept, and recorded as soon as there is room."""
    clock = HandClock()
    with files_no_larger_than(10):
        with pytest.warns(GradsightWarning, match="cannot be written yet: .*Training goes on"):
            store = open_store(tmp_path / "run", clock)
        fill(store, range(50))
        store.write_config({"settings": {"mine": 1}})
        clock.tick()
        assert store.next_step() == 50
        with pytest.raises(WrongPlace):
            open_run(tmp_path / "run")
    clock.tick()
    assert steps_in(tmp_path / "run") == list(range(50))
    fill(store, range(50, 60))
    store.close()
    run = open_run(tmp_path / "run")
    assert [step.step for step in run.steps()] == list(range(60))
    assert run.config == {"settings": {"mine": 1}}
    assert [problem.key for problem in run.problems()] == ["store-opening"]
    assert len(list(run.parameter_stats("a.bias"))) == 60


def test_a_disk_that_stays_full(tmp_path: Path) -> None:
    with files_no_larger_than(10), pytest.warns(GradsightWarning) as said:
        store = open_store(tmp_path / "run", HandClock())
        fill(store, range(5))
        store.close()
    texts = [str(warning.message) for warning in said]
    assert len(texts) == 2, texts
    assert "could not be written, and are lost" in texts[1]


def test_a_record_that_has_no_room_beside_the_old_one(tmp_path: Path) -> None:
    """Everything stays in the tail, which readers read."""
    small_run(tmp_path)
    store = open_store(tmp_path)
    fill(store, range(5, 40))
    with files_no_larger_than(100_000), pytest.warns(GradsightWarning, match="cannot be written"):
        store.close()
    assert steps_in(tmp_path) == list(range(40))
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", rundir.RECORD, rundir.TAIL}
    store = open_store(tmp_path)
    assert store.next_step() == 40
    store.close()
    assert (tmp_path / rundir.TAIL).stat().st_size < 100
    assert steps_in(tmp_path) == list(range(40))


def look(store: Store, clock: HandClock) -> None:
    """Let the store's thread look whether the run directory is there."""
    for _ in range(store_module._LOOKS):
        clock.tick()


@pytest.mark.parametrize("replacement", ["nothing", "a file", "a folder", "another run"])
def test_a_run_directory_that_is_removed_under_way(replacement: str, tmp_path: Path) -> None:
    clock = HandClock()
    run_dir = tmp_path / "run"
    store = open_store(run_dir, clock)
    fill(store, range(3))
    shutil.rmtree(run_dir)
    other = small_run(tmp_path / "other")
    if replacement == "a file":
        run_dir.write_text("mine")
    elif replacement == "a folder":
        run_dir.mkdir()
    elif replacement == "another run":
        other.rename(run_dir)
    before = sorted((str(file), file.stat().st_mtime_ns) for file in tmp_path.rglob("*"))
    with pytest.warns(GradsightWarning, match="was removed while it was written") as said:
        look(store, clock)
        fill(store, range(3, 50))
        look(store, clock)
        store.write_config({})
        store.close()
    assert len(said) == 1
    assert sorted((str(file), file.stat().st_mtime_ns) for file in tmp_path.rglob("*")) == before
    assert not store._waiting, "what cannot be kept takes no memory"


def test_a_removal_is_said_at_the_end_at_the_latest(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run", HandClock())
    fill(store, range(3))
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(GradsightWarning, match="was removed while it was written"):
        store.close()


def test_a_run_directory_that_is_moved_under_way(tmp_path: Path) -> None:
    """What follows is kept where it was moved to."""
    clock = HandClock()
    store = open_store(tmp_path / "run", clock)
    fill(store, range(3))
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.warns(GradsightWarning, match="was moved or replaced") as said:
        look(store, clock)
        fill(store, range(3, 6))
        store.close()
    assert len(said) == 1
    assert not (tmp_path / "run").exists()
    assert steps_in(tmp_path / "moved") == list(range(6))


def test_leftovers_are_removed_and_links_left_alone(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path / "run")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (rundir.RECORD, rundir.TAIL, rundir.CONFIG):
        (run_dir / f".{name}.0123abcd.partial").write_text("left by a kill")
        (run_dir / f"{name}.partial").symlink_to(victim)
    (run_dir / ".notes.0123abcd.partial").write_text("somebody else's")
    open_store(run_dir).close()
    left = {file.name for file in run_dir.iterdir() if not file.is_symlink()}
    assert left == {rundir.RECORD, rundir.TAIL, rundir.CONFIG, ".notes.0123abcd.partial"}
    assert victim.read_text() == "mine"


def test_no_file_of_a_run_is_mapped_into_memory(tmp_path: Path) -> None:
    """A file that cannot be written any more would end the process with SIGBUS."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dumper = gradsight.GradientDumper(tmp_path, step_interval=2)
    watched = gradsight.watch(model, optimizer, run_dir=tmp_path, dump=dumper)
    store = open_store(tmp_path)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with store._tending:
            store._publish()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    store.close()
    watched.close()
    assert steps_in(tmp_path) == list(range(4))


def test_a_handler_that_logs_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """Signals of the user's come between any two lines, also while the tail is locked."""
    store = open_store(tmp_path)
    assert store._tail is not None
    append = store._tail.append

    def interrupted(kind: int, payload: bytes) -> None:
        if not calls:
            calls.append(1)
            store.add_step(Step(1, 1.0), [])
        append(kind, payload)

    calls: list[int] = []
    store._tail.append = interrupted  # type: ignore[method-assign]
    store.add_step(Step(0, 1.0), [])
    store.close()
    assert steps_in(tmp_path) == [0, 1]


def test_threads_hand_over_without_waiting_for_the_record(tmp_path: Path) -> None:
    """While it is published, and in any order; nothing is lost."""
    store = open_store(tmp_path)

    def log(thread: int) -> None:
        for number in range(200):
            store.add_tracked(number, {f"thread/{thread}": 1.0})

    threads = [threading.Thread(target=log, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with store._tending:
            store._publish()
    for thread in threads:
        thread.join()
    store.close()
    assert len(list(open_run(tmp_path).scalars())) == 800


@pytest.mark.slow
def test_steps_are_read_beside_a_writer_that_publishes(tmp_path: Path) -> None:
    """Never a gap, never a step twice, never fewer than before."""
    small_run(tmp_path, steps=1)
    store = open_store(tmp_path)
    stop = threading.Event()

    def write() -> None:
        number = 1
        while not stop.is_set():
            fill(store, [number])
            number += 1
            if number % 50 == 0:
                with store._tending:
                    store._publish()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        kept = open_run(tmp_path)
        seen = reads = 0
        while reads < 60 or seen <= 50:
            reads += 1
            run = open_run(tmp_path) if reads % 2 else kept
            steps = [step.step for step in run.steps()]
            assert steps == list(range(len(steps)))
            assert len(steps) >= seen
            seen = len(steps)
    finally:
        stop.set()
        writer.join()
    store.close()


def test_a_tail_without_its_record_begins_anew(tmp_path: Path) -> None:
    """As the error says that a damaged record is moved away to do so."""
    small_run(tmp_path)
    (tmp_path / rundir.RECORD).write_bytes(b"damaged")
    with pytest.raises(RunError, match="Move it away to start this run anew"):
        open_store(tmp_path)
    (tmp_path / rundir.RECORD).unlink()
    store = open_store(tmp_path)
    assert store.next_step() == 0
    fill(store, [0])
    store.close()
    assert steps_in(tmp_path) == [0]


WITHOUT_POSIX = """
import concurrent.futures, logging, os, random, subprocess, sys, tempfile
import cyclopts, numpy, pyarrow, rich
for name in [name for name in sys.modules if name.startswith("gradsight")]:
    del sys.modules[name]
sys.modules["fcntl"] = None
for name in ("O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_CLOEXEC", "register_at_fork"):
    delattr(os, name)
os.supports_dir_fd = set()
import gradsight.store.reader, gradsight.store.store, gradsight.cli.verify
from gradsight.errors import WrongPlace
for opening in (gradsight.store.store.open_store, gradsight.store.reader.open_run):
    try:
        opening(sys.argv[1])
    except WrongPlace as error:
        print(error)
"""


def test_a_system_without_these_files_is_told_so(tmp_path: Path) -> None:
    """Windows can import everything, and is refused in words where a run would be opened."""
    run_dir = small_run(tmp_path)
    done = run_python(WITHOUT_POSIX, run_dir)
    assert done.stdout.count("Linux and macOS") == 2, done.stdout + done.stderr


def test_an_untouched_run_gives_the_same_twice(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path)
    assert repr(everything(run_dir)) == repr(everything(run_dir))
