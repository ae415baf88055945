"""Kills a writer with -9 while it opens, writes and publishes; then reads the run and goes on.

    python tests/store/kills.py --tries 400

prints what was found; the last line is one JSON object with the failures.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gradsight import open_run
from gradsight.core import rundir
from gradsight.errors import WrongPlace
from gradsight.store import store as store_module
from gradsight.store.store import open_store
from store.crafted import fill

PROMISE = "a run that was killed at any moment is read without a gap, and goes on"


def write_until_killed(folder: Path, told: int, publishing: bool) -> None:
    """In a child: open the run, add steps, and tell the parent of each that was handed over."""
    if publishing:
        store_module._SMALL = 1
    store = open_store(folder)
    first = store.next_step()
    for number in range(first, first + 10**9):
        fill(store, [number])
        os.pwrite(told, number.to_bytes(8, "little"), 0)
        if publishing and number % 7 == 0:
            with store._tending:
                store._publish()


def last_step(told: int) -> int:
    """Return the number of the last step that a writer has added, -1 before the first."""
    return int.from_bytes(os.pread(told, 8, 0), "little", signed=True)


def one_try(folder: Path, delay: float, publishing: bool, steps: int = 0) -> str:
    """Kill a writer that has added a number of steps, after a delay; check what it left."""
    with tempfile.TemporaryFile() as told:
        os.pwrite(told.fileno(), (-1).to_bytes(8, "little", signed=True), 0)
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(folder, told.fileno(), publishing)
            finally:
                os._exit(1)
        while last_step(told.fileno()) < steps - 1 and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = last_step(told.fileno())
    try:
        numbers = [step.step for step in open_run(folder).steps()]
        found = "read"
    except WrongPlace:
        # There is none: nothing was handed over.
        numbers = []
        found = "none"
    if numbers != list(range(len(numbers))) or len(numbers) < last + 1:
        return f"FAILED: {len(numbers)} steps of {last + 1}, or with gaps"
    store = open_store(folder)
    following = store.next_step()
    store.close()
    if following != len(numbers):
        return f"FAILED: goes on after {following} of {len(numbers)}"
    leftovers = {file.name for file in folder.iterdir()} - {rundir.RECORD, rundir.TAIL}
    return f"FAILED: left {leftovers}" if leftovers else found


def campaign(tries: int, seed: int = 0, longest: float = 0.07) -> Counter[str]:
    """Kill writers, each on a new run or on the one before.

    Of each four, two are killed at any moment from their start on, and two after some steps.
    """
    chance = random.Random(seed)
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        for number in range(tries):
            if chance.random() < 0.7:
                shutil.rmtree(folder, ignore_errors=True)
            publishing = number % 2 == 1
            steps = chance.randrange(1, 60) if number % 4 >= 2 else 0
            results[one_try(folder, chance.uniform(0, longest), publishing, steps)] += 1
    return results


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=0.07)
    options = parser.parse_args()
    results = campaign(options.tries, options.seed, options.longest)
    print(dict(sorted(results.items())))
    failures = sum(count for result, count in results.items() if result.startswith("FAILED"))
    print(json.dumps({"promise": PROMISE, "tries": options.tries, "failures": failures}))


if __name__ == "__main__":
    main()
