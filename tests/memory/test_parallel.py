"""Checkpointing under DistributedDataParallel and FSDP2, applied before and after, on two ranks."""

from pathlib import Path

from launch import run_ranks

WORKER = Path(__file__).with_name("parallel_worker.py")


def test_two_ranks() -> None:
    printed = run_ranks(WORKER)
    assert sorted(line for line in printed.splitlines() if line.endswith("same")) == [
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
