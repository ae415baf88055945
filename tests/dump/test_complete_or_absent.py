"""Whatever happens while a dump is written, there is a complete one or none."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import warm
from dump.dumps import find_dumps, is_intact
from gradsight import GradientDumper, load_keys
from gradsight.core import files
from gradsight.dump.folders import Layout
from gradsight.errors import GradsightWarning, RunError

WORKERS = Path(__file__).parent / "workers"


def run_worker(name: str, *arguments: object) -> str:
    done = warm.run([WORKERS / name, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def kill(*arguments: object) -> list[int]:
    """Return the numbers that the worker printed."""
    return [int(number) for number in run_worker("killed.py", *arguments).split()]


def test_kill_at_some_points_of_a_write_and_at_any_time(tmp_path: Path) -> None:
    """At every ninth call to the system; the tests below have every call."""
    points, kills, left_a_dump = kill(tmp_path, "some")
    assert points > 30, "the dump was killed at many points"
    assert kills == left_a_dump == 8, "a dump that was complete before stays, or is replaced whole"


@pytest.mark.slow
def test_kill_at_every_point_of_a_write_and_at_any_time(tmp_path: Path) -> None:
    full, sampled, kills, left_a_dump = kill(tmp_path, "first")
    assert min(full, sampled) > 30, "each dump was killed at many points"
    assert kills == left_a_dump == 25, "a dump that was complete before stays, or is replaced whole"


@pytest.mark.slow
def test_kill_at_every_point_of_a_replacement_and_a_removal(tmp_path: Path) -> None:
    again, last = kill(tmp_path, "again")
    assert min(again, last) > 30, "each dump was killed at many points"


def test_no_file_may_grow_beyond_a_limit(tmp_path: Path) -> None:
    run_worker("full_disk.py", tmp_path, "limited")


def test_a_full_disk(tmp_path: Path) -> None:
    """A small file system fills up; one is read-only."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    apart = ("unshare", "--mount", *user)
    if shutil.which("unshare") is None:
        pytest.skip("a small file system needs unshare, which this machine does not have")
    tried = subprocess.run(
        [*apart, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if tried.returncode != 0:
        pytest.skip(f"no right to mount a small file system here: {tried.stderr.strip()}")
    command = [*apart, sys.executable, str(WORKERS / "full_disk.py"), str(tmp_path), "small"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_read_only_folder(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on without dumps; the fault is told once, and counted."""

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    if os.geteuid() == 0:  # whom no permission stops
        monkeypatch.setattr(os, "mkdir", refuse)
    tmp_path.chmod(0o555)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with GradientDumper(tmp_path) as dumper:
            for step in range(3):
                dumper.dump(model, step)
                dumper.wait()
    tmp_path.chmod(0o755)
    assert "gradient dump of step 0: Permission denied: " in str(told[0].message)
    assert len(told) == 1
    assert (dumper.written, dumper.failed, dumper.problems[0].count) == (0, 3, 3)
    assert not list(tmp_path.iterdir())


def test_a_run_dir_that_becomes_a_file(tmp_path: Path, model: nn.Module) -> None:
    with (
        pytest.warns(GradsightWarning, match="Not a directory"),
        GradientDumper(tmp_path / "run") as dumper,
    ):
        (tmp_path / "run").write_text("")
        dumper.dump(model, 0)
    assert dumper.failed == 1


def test_the_same_step_again_after_a_restart(tmp_path: Path, model: nn.Module) -> None:
    for factor in (1.0, 2.0):
        with GradientDumper(tmp_path) as dumper:
            model[0].bias.grad.fill_(factor)
            folder = dumper.dump(model, 4)
    assert torch.equal(next(load_keys(folder, ["0.bias"])), torch.full((7,), 2.0))
    assert [path.name for path in (tmp_path / "gradient_dumper").iterdir()] == ["step4"]
    assert [path.name for path in folder.parent.iterdir()] == ["full_gradients"]


def test_fewer_ranks_after_a_restart_leave_no_shard_of_the_old_dump(
    dumped: Path, model: nn.Module
) -> None:
    """A file that the new dump does not have must not survive from the old one."""
    (dumped / "__7_0.distcp").write_bytes(b"old")
    with GradientDumper(dumped.parents[2]) as dumper:
        dumper.dump(model, 3)
    assert sorted(path.name for path in dumped.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "manifest.json",
    ]


def test_nothing_half_written_is_found(dumped: Path) -> None:
    partial = dumped.parents[1] / "step9.partial" / "full_gradients"
    shutil.copytree(dumped, partial)
    assert find_dumps(dumped.parents[2]) == [dumped]
    with pytest.raises(RunError, match="is still being written, or was left behind unfinished"):
        load_keys(partial, ["0.weight"])


def test_a_dump_about_to_be_replaced_comes_back(dumped: Path) -> None:
    """Killed between the two renames of a replacement: the old dump is the dump again."""
    aside = dumped.parents[1] / "step3.partial" / "full_gradients.old"
    aside.parent.mkdir()
    dumped.rename(aside)
    Layout(dumped.parents[2], "full").recover()
    assert is_intact(dumped)
    assert not aside.parent.exists()


def test_old_dumps_go_only_when_the_new_one_is_complete(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GradientDumper(tmp_path, keep_last=1) as dumper:
        dumper.dump(model, 0)
        dumper.wait()

        def fail(path: Path, parts: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "write_file", fail)
        dumper.dump(model, 1)
        with pytest.warns(GradsightWarning, match="No space left"):
            dumper.wait()
        assert [path.parent.name for path in find_dumps(tmp_path)] == ["step0"]
        monkeypatch.undo()
        dumper.dump(model, 2)
        dumper.wait()
    assert [path.parent.name for path in find_dumps(tmp_path)] == ["step2"]


def test_an_old_dump_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(layout: Layout, step: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Layout, "retire", refuse)
    dumper = GradientDumper(tmp_path, keep_last=1)
    dumper.dump(model, 0)
    dumper.wait()
    dumper.dump(model, 1)
    with pytest.warns(
        GradsightWarning, match="an old dump could not be removed: Permission denied"
    ):
        dumper.close()
    assert (dumper.written, dumper.failed) == (2, 0)


def test_a_fault_of_ours_does_not_reach_training(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr("gradsight.dump.full.write_metadata", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with GradientDumper(tmp_path) as dumper:
            dumper.dump(model, 0)
            dumper.dump(model, 1)
    assert [str(one.message) for one in caught] == [
        "gradient dump of step 0: RuntimeError: surprise"
    ]
    assert dumper.failed == 2
    assert not list(tmp_path.glob("gradient_dumper/*"))
