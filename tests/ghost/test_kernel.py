"""The Triton kernel, in Triton's interpreter; and what happens where it cannot run."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from ghost.small import loss_fn, pair, small
from gradsight import GhostEngine, GradsightError
from gradsight.errors import GradsightWarning

SCRIPT = Path(__file__).with_name("kernel_in_interpreter.py")
TESTS = SCRIPT.parents[1]


def test_the_kernel_is_exact_in_the_interpreter_and_given_up_where_it_is_not() -> None:
    # Triton decides when it is imported, for the whole process.
    path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "ok\n"


def test_without_a_device_for_it_scores_are_made_as_ever() -> None:
    found = []
    for kernel in (None, "triton"):
        torch.manual_seed(0)
        model = small()
        model.float()
        engine = GhostEngine(model, loss_fn, pair(2, 1), kernel=kernel)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", GradsightWarning)
            for step in range(2):
                with engine.observe():
                    loss_fn(model, pair(3, step)).backward()
        found.append(engine.scores.total)
        engine.close()
    assert torch.allclose(*found, rtol=1e-4)
    (told,) = [str(each.message) for each in caught if "triton" in str(each.message)]
    assert told.startswith("kernel='triton' is not used: ")


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(GradsightError, match="kernel must be 'triton', got 'cutlass'"):
        GhostEngine(small(), loss_fn, pair(2, 1), kernel="cutlass")
