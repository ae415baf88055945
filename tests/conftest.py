"""What all tests share."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Some virtual machines announce matrix tiles (AMX) and forbid them: there a product in bfloat16
# ends the process, with and without us. oneDNN reads this when torch is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch

# The tables of loops and models are imported by name.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["browser", "internals"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two workers on two cores: more threads only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _quick_garbage_collection() -> None:
    """Leave out older objects: with all packages imported, a collection takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left() -> Iterator[None]:
    """A process that compiles is looked at differently: no test may decide that for the next."""
    yield
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and dynamo.cached_backends:
        torch._dynamo.reset()
