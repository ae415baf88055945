"""What the tests of the dumps share."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gradsight import GradientDumper

Launch = Callable[..., list[int]]
WORKERS = Path(__file__).parent / "workers"


@pytest.fixture
def model() -> nn.Module:
    """A small model with gradients."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 300))
    layers(torch.randn(3, 5)).square().mean().backward()
    return layers


@pytest.fixture
def dumped(tmp_path: Path, model: nn.Module) -> Path:
    """The folder of one full dump, of step 3."""
    with GradientDumper(tmp_path / "run") as dumper:
        folder = dumper.dump(model, 3)
    assert folder is not None
    return folder


@pytest.fixture
def launch() -> Launch:
    """Run a worker on some ranks and return their exit codes; a failing rank's words are shown."""

    def start(worker: str | Path, ranks: int, *arguments: object) -> list[int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        world = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(WORKERS / worker), *map(str, arguments)]
        started = [
            subprocess.Popen(command, env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            return [process.wait(timeout=100) for process in started]
        finally:
            for process in started:
                process.kill()

    return start
