"""`make soak`: repeats the reliability campaign in short; prints tries and failures per promise.

    python benchmarks/reliability.py                    everything, about 15 minutes on two cores
    python benchmarks/reliability.py --only ranks,disk --scale 0.2
    python benchmarks/reliability.py --against main     what opening, a step and writing cost

Each part is a command of its own whose last lines are JSON: {"promise", "tries", "failures"}, and
"not_run" where this machine cannot try it. Ends with 1 where anything failed, or a part is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
TREE = HERE.parent
PATIENCE = 1800.0
"""Seconds after which a part is taken to hang."""


@dataclass(frozen=True)
class Part:
    """A command, and what its size is called on its command line."""

    script: str
    arguments: tuple[str, ...] = ()
    size: tuple[str, float] | None = None
    """The option for how much is tried, and its value at scale 1."""

    def command(self, scale: float) -> list[str]:
        """As it is started."""
        size = []
        if self.size is not None:
            option, whole = self.size
            size = [
                option,
                f"{whole * scale:g}" if whole == 1 else str(max(1, round(whole * scale))),
            ]
        return [sys.executable, str(TREE / self.script), *self.arguments, *size]


PARTS = {
    "faults": Part("tests/session/planted_faults.py"),
    "threads": Part("tests/session/threads_campaign.py", size=("--tries", 20)),
    "flips": Part("tests/store/flips.py", size=("--tries", 100)),
    "fuzz": Part("fuzz/run.py", size=("--seconds", 8)),
    "kills": Part("benchmarks/soak/kills.py", size=("--scale", 1)),
    "disk": Part("benchmarks/soak/full_disk.py"),
    "checkpoints": Part("benchmarks/soak/checkpoints.py", size=("--tries", 300)),
    "ranks": Part("benchmarks/soak/uneven.py", size=("--scale", 1)),
    "endings": Part("benchmarks/endings.py", size=("--jobs", 60)),
    "long": Part("benchmarks/soak/long_run.py", size=("--scale", 1)),
}


@dataclass(frozen=True)
class Outcome:
    """What is known of one promise."""

    promise: str
    tries: int = 0
    failures: int = 0
    note: str = ""
    said: list[str] = field(default_factory=list)
    """The end of what a part printed that failed."""


def run(name: str, part: Part, scale: float) -> list[Outcome]:
    """Every promise that a part tells of; a part that tells of none has failed."""
    if not (TREE / part.script).exists():
        return [Outcome(name, 1, 1, f"missing: {part.script}")]
    began = time.monotonic()
    paths = [str(TREE / "src"), str(TREE / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            part.command(scale), capture_output=True, text=True, timeout=PATIENCE, env=environment
        )
    except subprocess.TimeoutExpired:
        return [Outcome(name, 1, 1, f"did not end within {PATIENCE:g} s")]
    lines = done.stdout.splitlines()
    took = f"{time.monotonic() - began:.0f} s"
    found = [outcome for line in lines if (outcome := read(line, took)) is not None]
    said = [*lines, *done.stderr.splitlines()][-60:]
    if not found:
        return [Outcome(name, 1, 1, f"ended with {done.returncode} and told nothing", said)]
    if any(outcome.failures for outcome in found):
        found[-1] = Outcome(**{**vars(found[-1]), "said": said})
    return found


def read(line: str, took: str) -> Outcome | None:
    """The outcome that a line tells of; None for any other line."""
    try:
        values = json.loads(line)
        return Outcome(
            str(values["promise"]),
            int(values["tries"]),
            int(values["failures"]),
            f"not run: {values['not_run']}" if values.get("not_run") else took,
        )
    except (ValueError, TypeError, KeyError):
        return None


def table(outcomes: list[Outcome]) -> str:
    """One line per promise."""
    width = max(len(outcome.promise) for outcome in outcomes)
    head = f"{'promise':{width}}  {'tries':>6}  {'failures':>8}"
    rows = [
        f"{one.promise:{width}}  {one.tries:6}  {one.failures:8}  {one.note}" for one in outcomes
    ]
    return "\n".join([head, *rows])


def main(names: list[str], scale: float) -> int:
    """Run the parts one after the other; 1 where anything failed."""
    outcomes: list[Outcome] = []
    for name in names:
        print(f"{name} ...", flush=True)
        found = run(name, PARTS[name], scale)
        outcomes += found
        for outcome in found:
            print(*outcome.said, sep="\n", end="\n" if outcome.said else "", flush=True)
        print(table(found), flush=True)
    print()
    print(table(outcomes))
    return int(any(outcome.failures for outcome in outcomes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of everything is tried")
    parser.add_argument("--against", metavar="REV", help="compare costs with a git revision")
    options = parser.parse_args()
    if options.against is not None:
        command = [sys.executable, str(HERE / "soak" / "cost.py"), "--against", options.against]
        sys.exit(subprocess.run(command).returncode)
    wanted = options.only.split(",")
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}: it is one of {', '.join(PARTS)}")
    sys.exit(main(wanted, options.scale))
