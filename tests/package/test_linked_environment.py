"""The main commands in an environment that is reached through a symbolic link."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from train.small import options, write_text

MODEL = """
import torch
from torch import nn


def build():
    block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return nn.Sequential(*[block() for _ in range(4)]), torch.randn(512, 64), loss_fn


def loss_fn(model, batch):
    return model(batch).square().mean()
"""
SCRIPT = """
from model import build, loss_fn
import torch

model, batch, _ = build()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RUN_ALL = """
import json, sys
from gradsight.cli import main

for command in json.loads(sys.argv[1]):
    print(command, flush=True)
    assert main(command) == 0
"""
COMMANDS = {
    "memory": [
        ["memory", "verify", "model.py:build"],
        ["memory", "predict", "model.py:build"],
        ["memory", "plan", "model.py:build", "--budget", "6MB"],
    ],
    "train": [
        ["train", *options(data="text", results_dir=".", experiment="run", startup_report=True)],
        ["report", "run"],
        ["verify", "run"],
    ],
    "check": [["check", "script.py"], ["preflight", "script.py"]],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.slow
def test_commands_run_behind_a_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "environment").symlink_to(sys.prefix, target_is_directory=True)
    python = tmp_path / "environment" / "bin" / Path(sys.executable).name
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)
    write_text(tmp_path / "text")
    command = [python, "-c", RUN_ALL, json.dumps(COMMANDS[name])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
