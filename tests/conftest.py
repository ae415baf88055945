"""What all tests share."""

import os
import sys
from pathlib import Path

import pytest

# Some virtual machines announce matrix tiles (AMX) and forbid them: there a product in bfloat16
# ends the process, with and without us. oneDNN reads this when torch is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch

# The tables of loops and models are imported by name.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["browser"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two workers on two cores: more threads only get in each other's way."""
    torch.set_num_threads(1)
