"""What the record costs beside another version's: opening, a step on the training thread, writing.

    git worktree add /tmp/before 8986685
    python benchmarks/record_costs.py --against /tmp/before/src

Both are measured by turns in processes of their own, the other one twice: A/A is what the same code
differs from itself. Times are medians, or the processor's; the last line is JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "src"
PARAMETERS = 150
OPENINGS = 15


def measure(steps: int) -> dict[str, float]:
    """The costs of the version that can be imported here."""
    import numpy as np

    from gradsight import open_run
    from gradsight.store import tail_format as frames
    from gradsight.store.store import open_store
    from gradsight.values.steps import Step

    names = [f"transformer.h.{number // 12}.part.{number % 12}" for number in range(PARAMETERS)]
    norms = np.random.default_rng(0).random(PARAMETERS)
    packed = frames.pack_statistics(None, dict.fromkeys(frames.COLUMNS[:4], norms))
    place = Path(tempfile.mkdtemp())
    opening = []
    closing = []
    for number in range(OPENINGS):
        begun = time.perf_counter()
        store = open_store(place / str(number))
        store.add_step(Step(0, 1.0), names)
        opened = time.perf_counter()
        store.close()
        opening.append(opened - begun)
        closing.append(time.perf_counter() - opened)
    store = open_store(place / "long")
    single = []
    processor = time.process_time()
    for number in range(steps):
        step = Step(number, 1.0, loss=1.0, lr=0.1, total_norm=1.0)
        begun = time.perf_counter()
        store.add_step(step, names, packed)
        single.append(time.perf_counter() - begun)
        if number % 10 == 0:
            time.sleep(0.001)  # as training does, which leaves time to the store's thread
    begun = time.perf_counter()
    store.close()
    closed = time.perf_counter() - begun
    written = time.process_time() - processor
    processor = time.process_time()
    assert sum(1 for _ in open_run(place / "long").steps()) == steps
    read_steps = time.process_time() - processor
    processor = time.process_time()
    table = open_run(place / "long").to_arrow("parameter_stats")
    assert table.num_rows == steps * PARAMETERS
    read = time.process_time() - processor
    shutil.rmtree(place)
    return {
        "open, ms": 1e3 * statistics.median(opening),
        "close, ms": 1e3 * statistics.median(closing),
        "open and close, ms": 1e3
        * statistics.median([one + other for one, other in zip(opening, closing, strict=True)]),
        "add_step, us": 1e6 * statistics.median(single),
        "add_step, 99%, us": 1e6 * statistics.quantiles(single, n=100)[-1],
        "processor for all steps, s": written,
        "close after all steps, ms": 1e3 * closed,
        "read the steps, ms": 1e3 * read_steps,
        "read the statistics, ms": 1e3 * read,
    }


def measured_apart(source: Path, steps: int) -> dict[str, float]:
    """The same in a process that imports another version."""
    command = [sys.executable, __file__, "--child", "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print a line for each cost: both versions, their ratio, and A/A."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="the src of another version")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child or given.against is None:
        print(json.dumps(measure(given.steps)))
        return
    sources = {"before": given.against, "now": HERE, "again": given.against}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for number in range(given.rounds):
        order = list(sources)
        order = order[number % 3 :] + order[: number % 3]
        for name in order:
            rounds[name].append(measured_apart(sources[name], given.steps))
    ratios: dict[str, Any] = {}
    for cost in rounds["now"][0]:
        median = {name: statistics.median(each[cost] for each in of) for name, of in rounds.items()}
        both = statistics.median([each[cost] for each in rounds["before"] + rounds["again"]])
        ratios[cost] = round(median["now"] / both, 3)
        apart = median["again"] / median["before"]
        print(f"{cost:28} {both:9.2f} {median['now']:9.2f}  x{ratios[cost]:.3f}  A/A {apart:.3f}")
    print(json.dumps({"steps": given.steps, "parameters": PARAMETERS, "ratios": ratios}))


if __name__ == "__main__":
    main()
