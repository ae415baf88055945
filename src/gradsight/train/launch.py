"""One process per device, where nobody else has started them.

Not by `torch.distributed.run`: it answers a signal with a traceback and the exit code 1, and hides
the code of a rank that failed behind the same 1. Users of the trainer are promised 130 and 143 for
signals, and 64 or 2 with one message for what went wrong.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from gradsight.errors import UsageError
from gradsight.train.config import Settings, to_dict

_GRACE = 30.0
"""Seconds that the others get to end when one process has failed."""


def processes_to_start(wanted: int | None, device: str) -> int:
    """How many processes to start: 1 is this one. Under torchrun they are there already."""
    if wanted is not None and wanted < 1:
        raise UsageError(f"--num_processes must be 1 or more, got {wanted}")
    if "RANK" in os.environ:
        return 1
    if wanted is not None or device == "cpu":
        return wanted or 1
    from gradsight.core.devices import gpu_count

    return max(1, gpu_count())


def start_processes(settings: Settings, flags: Sequence[str], count: int) -> int:
    """Run `gradsight train` in `count` processes of this machine; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="gradsight-") as folder:
        config = Path(folder) / "settings.json"
        config.write_text(json.dumps(to_dict(settings)))
        command = [sys.executable, "-m", "gradsight", "train", "--config", str(config), *flags]
        port = _free_port()
        children = [
            subprocess.Popen(command, env=_environment(rank, count, port)) for rank in range(count)
        ]
        return _wait(children)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun would set, and cores shared out fairly."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return {
        "OMP_NUM_THREADS": str(threads),  # before the user's own, which win
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Pass signals on, end the others when one fails, and give the first failure's code."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        codes = [child.poll() for child in children]
        while None in codes and not any(codes):
            time.sleep(0.05)
            codes = [child.poll() for child in children]
        _end(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all; those that wait for one that has failed are ended."""
    until = time.monotonic() + _GRACE
    # 130 and 143 are ends that a signal asked for: the others are on their way to one too.
    fine = (None, 0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
    failed = any(child.returncode not in fine for child in children)
    for child in children:
        if failed and child.poll() is None:
            child.terminate()
        try:
            child.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
