"""What all tests share."""

import sys
from pathlib import Path

import pytest
import torch

# The tables of loops and models are imported by name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two workers on two cores: more threads only get in each other's way."""
    torch.set_num_threads(1)
