"""Sends SIGTERM to watched loops: inside every function of ours, and at random moments.

    python tests/session/signalled.py [--tries 1000]

Every try is a forked child that trains and tells its parent of each step that it has made. The
process must end by the signal in time, with all of those steps in the record.
"""

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import gradsight

# Run as a script, it must find its neighbour by the same name as the tests do.
sys.path.insert(0, str(Path(__file__).parents[1]))
from session.planted_faults import LOOPS, Seen, functions, is_candidate, name_of

HANG = 60.0
"""Seconds after which a process counts as one that never ends, however busy the machine is."""
PROMISED = 5.0
STEPS = 16


@dataclass(frozen=True)
class Ending:
    """How a child ended."""

    status: int
    """Its exit code, negative for a signal; None-like 999 where it had to be killed."""
    seconds: float
    """From the signal on."""
    made: int
    """Steps that it has told of."""
    recorded: list[int]
    said: str

    def wrong(self) -> str | None:
        """What is not as it should be after SIGTERM."""
        if self.status != -signal.SIGTERM:
            return f"ended with {self.status}: {self.said[-300:]}"
        if self.recorded != list(range(len(self.recorded))) or len(self.recorded) < self.made:
            return f"{self.made} steps made, recorded: {self.recorded}"
        return None


KILLED = 999


def train(run_dir: Path, tell: Callable[[], None], steps: int = STEPS, dumps: bool = True) -> None:
    """A loop with all instruments; `tell` after every step. Never closes by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dumper = None
    if dumps:
        dumper = gradsight.GradientDumper(run_dir, step_interval=3, keep_last=2, dump_on="critical")
    watched = gradsight.watch(
        model,
        optimizer,
        run_dir=run_dir,
        sinks=[Seen()],
        histograms=gradsight.Schedule(step_interval=4),
        recorder="batch",
        dump=dumper,
    )
    for step in range(steps):
        batch = torch.randn(5, 4)
        if step == 7:
            batch[1, 1] = float("nan")
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters():
            torch.nan_to_num_(parameter.grad)
        optimizer.step()
        watched.log(loss=loss)
        tell()
    watched.close()


Child = Callable[[Path, Callable[[], None]], None]
Parent = Callable[[int, int], None]


def ended(child: Child, parent: Parent | None = None) -> Ending:
    """Run a child to its end; `parent` is given its pid and the pipe that tells of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        reading, writing = os.pipe()
        said = Path(folder) / "said"
        pid = os.fork()
        if pid == 0:
            _be_the_child(child, Path(folder) / "run", writing, said)
        os.close(writing)
        if parent is not None:
            parent(pid, reading)
        began = time.monotonic()
        status, made = _wait(pid, reading)
        seconds = time.monotonic() - began
        os.close(reading)
        recorded = []
        # Without one, it ended before the watch was open.
        if (Path(folder) / "run" / "run.sqlite").exists():
            recorded = [step.step for step in gradsight.open_run(Path(folder) / "run").steps()]
        return Ending(status, seconds, made, recorded, said.read_text() if said.exists() else "")


def _be_the_child(child: Child, run_dir: Path, writing: int, said: Path) -> None:
    code = 70
    try:
        output = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pytest has put objects of its own in their place.
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        child(run_dir, lambda: _tell(writing))
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _tell(writing: int) -> None:
    os.write(writing, b".")


def _wait(pid: int, reading: int) -> tuple[int, int]:
    """The exit code, and how many steps were told of. A process that never ends is killed."""
    made = 0
    until = time.monotonic() + HANG
    while time.monotonic() < until:
        if select.select([reading], [], [], 0.02)[0]:
            made += len(os.read(reading, 4096))
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            while part := os.read(reading, 4096):
                made += len(part)
            return os.waitstatus_to_exitcode(status), made
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return KILLED, made


class Sender:
    """A profile that sends SIGTERM to its own process inside one function of ours."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._left > 0 and is_candidate(frame, event) and name_of(frame.f_code) == self._name:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def inside(name: str, number: int) -> Ending:
    """The signal comes at this call of this function, in the thread that trains."""

    def child(run_dir: Path, tell: Callable[[], None]) -> None:
        sys.setprofile(Sender(name, number))
        train(run_dir, tell)
        sys.setprofile(None)
        # The function was not called so often this time: it comes at the end instead.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HANG)

    return ended(child)


def at_random(delay: float) -> Ending:
    """The signal comes so long after the first step."""

    def parent(pid: int, reading: int) -> None:
        select.select([reading], [], [], HANG)
        time.sleep(delay)
        os.kill(pid, signal.SIGTERM)

    return ended(lambda run_dir, tell: train(run_dir, tell, steps=10**9), parent)


def names_inside() -> dict[str, int]:
    """Every function that the first loop of the planted faults runs through, and how often."""
    found: dict[CodeType, int] = functions(LOOPS["optimizer"])
    return {name_of(code): count for code, count in found.items()}


def campaign(tries: int, seed: int = 0) -> tuple[int, list[str], float]:
    """Tries, failures, and the longest that a process took to end."""
    choose = random.Random(seed)
    found = names_inside()
    names = sorted(found)
    failures: list[str] = []
    longest = 0.0
    for number in range(tries):
        if number % 3:
            name = names[(number * 7) % len(names)]
            call = choose.randint(1, max(1, found[name]))
            what = f"{name}, call {call}"
            ending = inside(name, call)
        else:
            delay = choose.uniform(0, 0.4)
            what = f"after {delay:.3f} s"
            ending = at_random(delay)
            longest = max(longest, ending.seconds)
            if ending.seconds > PROMISED:
                failures.append(f"{what}: took {ending.seconds:.1f} s")
        wrong = ending.wrong()
        if wrong is not None:
            failures.append(f"{what}: {wrong}")
    return tries, failures, longest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tries, failures, longest = campaign(given.tries, given.seed)
    print(*failures, sep="\n")
    print(f"the longest that a process took to end: {longest:.1f} s")
    promise = "SIGTERM ends the process in time with all steps recorded"
    print(json.dumps({"promise": promise, "tries": tries, "failures": len(failures)}))
    sys.exit(bool(failures))
