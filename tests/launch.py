"""Runs a script on several gloo ranks of this machine, through torchrun as users do."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def torchrun(script: Path, *args: object, ranks: int = 2, timeout: float = 120) -> str:
    """What the ranks printed; a failure is an assertion error with their output."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    command += [f"--nproc_per_node={ranks}", str(TESTS / "rank_script.py")]
    command += [str(script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
