"""Checkpointing under DistributedDataParallel and FSDP2, applied before and after, on two ranks."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("parallel_worker.py")


def test_two_ranks() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(WORKER),
    ]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(line for line in done.stdout.splitlines() if line.endswith("same")) == [
        "ddp full after same",
        "ddp full before same",
        "ddp full checked same",
        "ddp selective after same",
        "fsdp full after same",
        "fsdp full before same",
        "fsdp full checked same",
        "fsdp measured same",
        "fsdp selective after same",
    ]
