"""Runs a script on several gloo ranks of this machine."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

import warm

TESTS = Path(__file__).parent


def run_ranks(
    script: Path,
    *args: object,
    ranks: int = 2,
    timeout: float = 120,
    preload: Sequence[str] = (),
) -> str:
    """Run a script on ranks that are forked with torch imported; return what they printed.

    The ranks get the environment variables and the store that torchrun would give them. If one
    fails, the others are killed, and the failure is an assertion error with their output.
    `preload` names modules that are imported before the ranks are forked.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    with tempfile.TemporaryFile("a+") as stdout, tempfile.TemporaryFile("a+") as stderr:
        started = [
            warm.Popen(
                [TESTS / "rank_script.py", script, *args],
                stdout=stdout,
                stderr=stderr,
                preload=preload,
                env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + timeout
        try:
            while (codes := [rank.poll() for rank in started]) != [0] * ranks:
                failed = any(codes) or time.monotonic() > deadline
                assert not failed, f"exit codes {codes}\n{_end_of(stdout)}{_end_of(stderr)}"
                time.sleep(0.01)
        finally:
            for rank in started:
                rank.kill()
                rank.wait()
        stdout.seek(0)
        return stdout.read()


def _end_of(stream: "tempfile._TemporaryFileWrapper[str]") -> str:
    """The last 6,000 characters of a file."""
    stream.seek(0)
    return stream.read()[-6000:]


def torchrun(script: Path, *args: object, ranks: int = 2, timeout: float = 120) -> str:
    """Run a script through torchrun as users do; return what the ranks printed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={ranks}"]
    command += [str(TESTS / "rank_script.py"), str(script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
