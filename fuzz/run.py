"""A minute of garbage for every reader: `make fuzz`, or `python fuzz/run.py --seconds 10 manifest`.

Each other file here is one reader's: `target(data)` may raise GradsightError and nothing else, must
come back within seconds, and must not take more memory than reading commands are allowed.
`corpus()` gives what to begin with. A target runs in a process of its own; what failed is kept in
fuzz/failures, to be given to `target` again. The last line is JSON.
"""

import argparse
import hashlib
import importlib
import json
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
FAILURES = HERE / "failures"
MEMORY = 2 << 30
"""Bytes that a reader may take beyond what importing it takes."""
SLOWEST = 30
"""Seconds for one input."""
_NOT_TARGETS = {"run", "mutate"}


class TooSlow(BaseException):
    """An input took too long; nothing that readers catch."""


def main() -> int:
    """Run every target, print what came of each, and all together as JSON."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("names", nargs="*", help="targets; all by default")
    asked.add_argument("--seconds", type=float, default=60.0, help="for each target")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    names = given.names or target_names()
    if given.child:
        print(json.dumps(attack(names[0], given.seconds, given.seed)))
        return 0
    results = [run_apart(name, given.seconds, given.seed) for name in names]
    for result in results:
        print(f"{result['name']:<14} {result['tries']:>8} tries  {result['failures']} failures")
    tries = sum(result["tries"] for result in results)
    failures = sum(result["failures"] for result in results)
    promise = "readers raise GradsightError and nothing else"
    print(json.dumps({"promise": promise, "tries": tries, "failures": failures}))
    return 1 if failures else 0


def target_names() -> list[str]:
    """The targets that there are."""
    return sorted(file.stem for file in HERE.glob("*.py") if file.stem not in _NOT_TARGETS)


def load(name: str) -> ModuleType:
    """A target by its name."""
    # By the name of their folder: alone, some of them are called as other modules are.
    if str(HERE.parent) not in sys.path:
        sys.path.append(str(HERE.parent))
    return importlib.import_module(f"{HERE.name}.{name}")


def run_apart(name: str, seconds: float, seed: int) -> dict[str, object]:
    """Run a target in a process of its own, which may die or hang."""
    command = [sys.executable, __file__, "--child", name, f"--seconds={seconds}", f"--seed={seed}"]
    try:
        # In the middle of a library's own code no signal is heard: then it is ended from here.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + 4 * SLOWEST, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: hangs", file=sys.stderr)
        return {"name": name, "tries": 1, "failures": 1}
    sys.stderr.write(done.stderr)
    if done.returncode:
        print(f"{name}: ended with {done.returncode}", file=sys.stderr)
        return {"name": name, "tries": 1, "failures": 1}
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def attack(name: str, seconds: float, seed: int) -> dict[str, object]:
    """Give a target one input after the other until the time is over."""
    mutated = load("mutate").mutated
    module = load(name)
    known = module.corpus() if hasattr(module, "corpus") else [b"", b"{}", b"[]"]
    for data in known:
        module.target(data)  # what is right must pass; and everything is imported by now
    limit_memory()
    signal.signal(signal.SIGALRM, _too_slow)
    rng = random.Random(f"{name} {seed}")
    end = time.monotonic() + seconds
    tries = failures = 0
    while time.monotonic() < end:
        data = mutated(rng.choice(known), known, rng)
        tries += 1
        fault = tried(module, data)
        if fault is not None:
            failures += 1
            keep(name, data, fault)
    return {"name": name, "tries": tries, "failures": failures}


def tried(module: ModuleType, data: bytes) -> str | None:
    """Give one input to a target; what was wrong, or None."""
    from gradsight.errors import GradsightError

    signal.setitimer(signal.ITIMER_REAL, SLOWEST)
    try:
        module.target(data)
    except GradsightError:
        return None
    except KeyboardInterrupt:
        raise
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def limit_memory() -> None:
    """From here on, no more than MEMORY beyond what is taken already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def keep(name: str, data: bytes, fault: str) -> None:
    """Keep an input that failed, and say how."""
    FAILURES.mkdir(exist_ok=True)
    file = FAILURES / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    file.write_bytes(data)
    print(f"{file}\n{fault}", file=sys.stderr)


def _too_slow(*_: object) -> None:
    raise TooSlow


if __name__ == "__main__":
    sys.exit(main())
