"""Gradsight's own Python calls per training step may only go down.

A call is a Python function of the package that is entered, or a generator of it that is resumed.
The number does not depend on the machine: it is counted in the training thread only (a background
thread works when the clock says so), over steps 100 to 149 of a watch and 20 to 39 of an engine.
By then nothing happens for the first time, and these windows hold a whole number of the periods at
which work is repeated (10 steps, 50 steps). No gradient in them is near a threshold of a check.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":  # pytest does this in conftest.py
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsight
import warm

STORED = Path(__file__).with_name("call_counts.json")
PACKAGE = str(Path(gradsight.__file__).parent) + os.sep
MAY_BE_LOWER = 0.02
"""The share by which a count may be lower than the stored one before that must be lowered."""


class Calls:
    """Counts the calls of Python functions in the package while it is switched on."""

    def __init__(self) -> None:
        self.count = 0

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.count += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        gc.disable()  # a finalizer could be called in any step
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            gc.enable()


def count_per_step(step: Callable[[int], None], first: int, last: int) -> float:
    """Run steps 0 to `last`; return the mean number of calls from `first` on."""
    for number in range(first):
        step(number)
    calls = Calls()
    for number in range(first, last + 1):
        with calls.counted():
            step(number)
    return calls.count / (last + 1 - first)


def watched_step(run_dir: Path, max_norm: float) -> float:
    """Count the calls of the README's loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gradsight.watch(model, optimizer, run_dir=run_dir) as watched:

        def step(number: int) -> None:
            loss = F.cross_entropy(model(0.3 * torch.randn(16, 32)), torch.randint(10, (16,)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss)

        return count_per_step(step, 100, 149)


class TinyGPT(nn.Module):
    """Embeddings, one block with attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.Linear(8, 24)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)
        self.head = nn.Linear(8, 23, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(x + self.down(F.gelu(self.up(x))))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def observed_step(run_dir: Path, mode: str) -> float:
    """Count the calls of an engine that scores every sample of every step."""
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    validation = torch.randint(23, (4, 7))
    engine = gradsight.GhostEngine(
        model, next_token_loss, validation, optimizer=optimizer, mode=mode, run_dir=run_dir
    )

    def step(number: int) -> None:
        engine.loss(torch.randint(23, (6, 7)), step=number).backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        return count_per_step(step, 20, 39)
    finally:
        engine.close()


CASES: dict[str, Callable[[Path], float]] = {
    "watched step": lambda folder: watched_step(folder, max_norm=1.0),
    "watched step with clipping": lambda folder: watched_step(folder, max_norm=0.01),
    "observed step, two_pass": lambda folder: observed_step(folder, "two_pass"),
    "observed step, concat": lambda folder: observed_step(folder, "concat"),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_per_step_only_go_down(case: str, tmp_path: Path) -> None:
    """A process of its own counts: an earlier test could have left a listener behind."""
    stored = json.loads(STORED.read_text())[case]
    done = warm.run([__file__, case, tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = float(done.stdout)
    assert found <= stored, f"Gradsight makes more Python calls per step: {found}, not {stored}"
    lower = (
        f"Gradsight makes fewer calls per step: store {found} instead of {stored} in {STORED.name}"
    )
    assert found >= stored * (1 - MAY_BE_LOWER), lower


def test_every_stored_count_is_measured() -> None:
    assert json.loads(STORED.read_text()).keys() == CASES.keys()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(CASES[sys.argv[1]](Path(sys.argv[2])))
