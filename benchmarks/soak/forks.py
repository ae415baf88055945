"""Children of a process that has imported everything: forked, killed or waited for, and judged.

A part of `make soak` is a command whose last lines are JSON: {"promise", "tries", "failures"}, and
"not_run" where it could not be tried here. What failed is printed before.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import gradsight

PATIENCE = 120.0
"""Seconds after which a child is taken to hang."""
HANGS = -1000


def import_everything() -> None:
    """Children are forked: what the parent has imported they need not."""
    torch.set_num_threads(1)
    for name in gradsight.__all__:
        getattr(gradsight, name)


def start(script: Callable[[], None], said: Path) -> int:
    """Run a script in a child; what it prints goes to a file. Ends without the usual endings."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        handle = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        script()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(child: int, patience: float = PATIENCE) -> int:
    """How a child ended: its code, -N for signal N, HANGS where it had to be ended."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HANGS


def kill_after(child: int, seconds: float) -> int:
    """Kill a child after so long, unless it has ended by then; how it ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def holds(check: Callable[[], None], said: Path) -> bool:
    """Whether a check passes, in a child of its own; prints what it said where it does not."""
    said.write_text("")
    code = ended(start(check, said))
    if code:
        print(f"  ended with {code}: {said.read_text()[-1500:]}", flush=True)
    return code == 0


def tell(promise: str, tries: int, failures: int, not_run: str | None = None) -> None:
    """The line that `make soak` reads."""
    found: dict[str, object] = {"promise": promise, "tries": tries, "failures": failures}
    if not_run is not None:
        found["not_run"] = not_run
    print(json.dumps(found), flush=True)
