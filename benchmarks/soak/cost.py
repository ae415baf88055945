"""What opening, a step and writing cost here and at another revision, measured side by side.

    python benchmarks/soak/cost.py --against main --rounds 7

Every round measures the other revision, this tree, and this tree once more, in a new order each
time. The second column of this tree (A/A) says what the machine's own noise is: a ratio above 1.05
by more than that noise is a failure.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
METER = Path(__file__).with_name("meter.py")
LIMIT = 1.05


def measured(tree: Path) -> dict[str, float]:
    """One process's medians, in seconds."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(METER)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def compare(other: Path, rounds: int) -> int:
    """Measure and print; 1 where something has become slower than the limit allows."""
    trees = {"other": other, "here": TREE, "here again": TREE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name in random.sample(sorted(trees), len(trees)):
            found[name].append(measured(trees[name]))
    failures = 0
    print(f"{'median of ' + str(rounds):28}{'other':>10}{'here':>10}{'ratio':>8}{'A/A':>8}")
    for what in found["other"][0]:
        medians = {
            name: statistics.median(one[what] for one in values) for name, values in found.items()
        }
        here = (medians["here"] + medians["here again"]) / 2
        ratio = here / medians["other"]
        noise = medians["here again"] / medians["here"]
        failed = ratio - abs(noise - 1) > LIMIT
        failures += failed
        times = f"{1e3 * medians['other']:8.3f}ms{1e3 * here:8.3f}ms"
        print(f"{what:28}{times}{ratio:8.3f}{noise:8.3f}{'  too slow' if failed else ''}")
    promise = f"opening, a step and writing cost at most {LIMIT}x"
    tries = len(found["other"][0])
    print(json.dumps({"promise": promise, "tries": tries, "failures": failures}))
    return int(failures > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", required=True, metavar="REV")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    # Ended from outside, it still removes the other revision's files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as place:
        other = Path(place) / "other"
        git = ["git", "-C", str(TREE), "worktree"]
        add = [*git, "add", "--detach", str(other), options.against]
        subprocess.run(add, check=True, capture_output=True)
        try:
            code = compare(other, options.rounds)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    sys.exit(code)
