"""Damages the files of a run and reads them: what is read is what was written, or an error.

    python tests/store/flips.py --tries 300

prints what became of every file's tries; the last line is one JSON object with the failures.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gradsight import GradsightError
from gradsight.cli.verify import verify
from gradsight.core import rundir
from gradsight.store.score_folder import write_scores
from gradsight.store.scores import ScoreFile, score_path
from gradsight.store.store import open_store
from gradsight.values.scores import SavedScore
from store.crafted import everything, fill, small_run

PROMISE = "a damaged file of a run is never read as if it were whole"


def make_run(folder: Path) -> Path:
    """A run as a kill leaves it: steps in the record, in the tail, and scores."""
    whole = small_run(folder / "whole", steps=40)
    rows = [SavedScore(n, n, "web", "t", n / 3, 0.1, 1.0, None, "plain") for n in range(400)]
    write_scores(score_path(whole, 10), rows, ScoreFile())
    store = open_store(whole)
    fill(store, range(40, 60))
    store.add_step_scalars(59, {"loss": 7.0})
    shutil.copytree(whole, folder / "killed")
    store.close()
    return folder / "killed"


def damage(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """Other bytes: some changed, some cut off, some zeroed or put in between."""
    kind = chance.choices(("changed", "cut", "zeroed", "inserted"), (70, 20, 5, 5))[0]
    place = chance.randrange(len(data))
    length = min(chance.randint(1, 64), len(data) - place)
    if kind == "cut":
        return kind, data[:place]
    if kind == "zeroed":
        return kind, data[:place] + bytes(length) + data[place + length :]
    if kind == "inserted":
        return kind, data[:place] + chance.randbytes(length) + data[place:]
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(len(data))] ^= chance.randint(1, 255)
    return kind, bytes(changed)


def outcome(folder: Path, expected: dict[str, list[Any]], torn: bool) -> str:
    """What became of a damaged run; torn: whether its tail may have lost its end."""
    try:
        found = everything(folder)
    except GradsightError:
        return "refused"
    if repr(found) == repr(expected):
        return "same"
    steps = found["steps"]
    prefix = repr(steps[:-1]) == repr(expected["steps"][: max(0, len(steps) - 1)])
    if torn and prefix and repr(found["parameter_stats"]) in _beginnings(expected, len(steps)):
        return "torn"
    return "FAILED: other values"


def _beginnings(expected: dict[str, list[Any]], steps: int) -> set[str]:
    return {repr(expected["parameter_stats"][: 2 * steps])}


def quiet_verify(folder: Path) -> int:
    """The exit code of `gradsight verify`, which may be a refusal."""
    try:
        with open("/dev/null", "w") as nowhere:
            before = sys.stdout
            sys.stdout = nowhere
            try:
                return verify(folder)
            finally:
                sys.stdout = before
    except GradsightError as error:
        return error.exit_code


def campaign(tries: int, seed: int = 0) -> dict[str, Counter[str]]:
    """So many tries for each file of a run."""
    chance = random.Random(seed)
    results: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        run_dir = make_run(Path(place))
        expected = everything(run_dir)
        assert math.isclose(expected["steps"][-1].loss, 7.0)
        assert quiet_verify(run_dir) == 0
        scores = f"{rundir.SCORES}/{rundir.score_file(10)}"
        for name in (rundir.RECORD, rundir.TAIL, rundir.CONFIG, scores):
            whole = (run_dir / name).read_bytes()
            counts = results[name] = Counter()
            for _ in range(tries):
                kind, data = damage(whole, chance)
                (run_dir / name).write_bytes(data)
                ends_in_zeros = kind == "zeroed" and data.endswith(b"\0")
                torn = name == rundir.TAIL and (kind == "cut" or ends_in_zeros)
                result = outcome(run_dir, expected, torn)
                code = quiet_verify(run_dir)
                if data != whole and (code != 0) != (result == "refused"):
                    # Bytes that mean nothing, such as spaces in JSON, may change.
                    result = f"FAILED: {result}, but verify says {code}"
                counts[result] += 1
            (run_dir / name).write_bytes(whole)
    return results


def main() -> None:
    """Print what became of the tries."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = campaign(options.tries, options.seed)
    for name, counts in results.items():
        print(name, dict(sorted(counts.items())))
    failures = sum(
        count
        for counts in results.values()
        for result, count in counts.items()
        if result.startswith("FAILED")
    )
    tries = sum(sum(counts.values()) for counts in results.values())
    print(json.dumps({"promise": PROMISE, "tries": tries, "failures": failures}))


if __name__ == "__main__":
    main()
