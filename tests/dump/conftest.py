"""What the tests of the dumps share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import warm
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
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        started = [
            warm.Popen(
                [WORKERS / worker, *arguments],
                env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        try:
            return [process.wait(timeout=200) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()

    return start
