"""Where Python lacks what only POSIX systems have, as on Windows, a loop is watched all the same."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import signal
import sys

import torch  # first: on this system torch itself needs what is taken away below

for name in ("fork", "register_at_fork", "set_blocking"):
    delattr(os, name)
for name in ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
os.supports_dir_fd = set()
del signal.pthread_sigmask
sys.modules.update(dict.fromkeys(["fcntl", "resource"]))  # importing them raises ImportError

import gradsight

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())

with gradsight.watch(model, optimizer) as watched:
    for _ in range(5):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watched.log(loss=loss)
    report = watched.report()
assert report.steps == 5, report
assert report.status == "healthy", report

def loss_fn(model, batch):
    return model(batch).square().mean()

engine = gradsight.GhostEngine(model, loss_fn, torch.randn(4, 4), optimizer=optimizer)
for _ in range(2):
    batch = torch.randn(8, 4)
    with engine.observe():
        loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
assert engine.scores.total.shape == (8,)
engine.close()

try:
    gradsight.watch(model, optimizer, run_dir="run")
except gradsight.GradsightError as error:
    assert "Without run_dir" in str(error), error
else:
    raise AssertionError("a run_dir was accepted")
"""


@pytest.mark.slow
def test_without_posix_everything_but_a_run_dir_works(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]  # a new interpreter: no module is imported before
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
