"""Kills a writing process before, or in the middle of, every single thing it asks of the system.

A child is forked for each point; it counts its calls and kills itself at its number. What it leaves
must be complete dumps only; then a fresh dumper in the same folder must succeed and leave nothing
but complete dumps.
"""

import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from gradsight import GradientDumper, load_keys
from gradsight.dump.folders import find_dumps, step_of
from gradsight.dump.verify import verify
from gradsight.errors import RunError

CALLS = ("open", "write", "fsync", "rename", "mkdir", "rmdir", "unlink", "close")


def model(value: float) -> nn.Module:
    layer = nn.Linear(30, 20)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return layer


def kill_at(point: int) -> None:
    """Count calls from now on and die at this one; a write dies half done."""
    left = point

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def values(run: Path) -> dict[int, float]:
    """The dumps there are, each intact and of one piece, by step."""
    try:
        folders = find_dumps(run)
    except RunError:
        return {}
    found = {}
    for folder in folders:
        verdict = verify(folder)
        assert verdict.intact, verdict
        entries = torch.cat(
            [tensor.reshape(-1) for tensor in load_keys(folder, ["weight", "bias"])]
        )
        assert (entries == entries[0]).all(), "old and new values are mixed"
        found[step_of(folder)] = float(entries[0])
    return found


def dump(run: Path, value: float, step: int, **options) -> None:
    with GradientDumper(run, asynchronous=False, **options) as dumper:
        dumper.dump(model(value), step)
        assert not dumper.failed, dumper.problems


def scenario(
    run: Path,
    before: dict[int, float],
    step: int,
    allowed: list[dict[int, float]],
    stride: int = 1,
    **options,
) -> int:
    """Kill at one point after the other until the dump gets through; return the last point."""
    for point in range(0, 1000, stride):
        shutil.rmtree(run, ignore_errors=True)
        for old, value in before.items():
            dump(run, value, old)
        child = os.fork()
        if child == 0:
            kill_at(point)
            dump(run, 9.0, step, **options)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        left = values(run)
        assert left in allowed, (point, left)
        dump(run, 10.0, 50, **options)
        kept = {key: value for key, value in values(run).items() if key != 50}
        assert "keep_last" in options or kept in [one for one in allowed if one or not before], (
            point,
            kept,
        )
        assert not list(run.glob("gradient_dumper/*.partial")), point
        if status == 0:
            return point
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    raise AssertionError("the dump never got through")


def any_time(run: Path, kills: int) -> int:
    """Kill a process that dumps in the background, each time after more steps.

    Its first dump is complete by then, so that there is always one. Returns how often there was.
    """
    left_a_dump = 0
    for steps in range(kills):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            dumper = GradientDumper(run, keep_last=3)
            dumper.dump(model(1.0), 0)
            dumper.wait()
            os.write(tell, b"x")
            for step in range(1, 10**6):
                dumper.dump(model(float(step)), step)
                os.write(tell, b"x")
        for _ in range(1 + steps):
            os.read(ready, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
        left = values(run)
        assert all(value == max(step, 1) for step, value in left.items())
        left_a_dump += bool(left)
    return left_a_dump


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    root = Path(sys.argv[1])
    if sys.argv[2] == "some":
        print(scenario(root / "full", {}, 3, [{}, {3: 9.0}], stride=9))
        print(8, any_time(root / "any", 8))
    elif sys.argv[2] == "first":
        print(scenario(root / "full", {}, 3, [{}, {3: 9.0}]))
        print(scenario(root / "sampled", {}, 3, [{}, {3: 9.0}], save_first_n=5))
        print(25, any_time(root / "any", 25))
    else:
        trimmed = [{1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0, 3: 9.0}, {2: 2.0, 3: 9.0}]
        print(scenario(root / "again", {3: 1.0}, 3, [{}, {3: 1.0}, {3: 9.0}]))
        print(scenario(root / "last", {1: 1.0, 2: 2.0}, 3, trimmed, keep_last=2))
