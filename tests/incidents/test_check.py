"""gradsight check on scripts that know nothing of it: the report names operation, line and sample."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradsight

SCRIPT = """
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return torch.log(self.head(x).softmax(1))


def main():
    torch.manual_seed(0)
    model = Scores()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(20):
        x = torch.randn(16, 4)
        if step == 12:
            x[7] *= 1e4
        loss = nn.functional.nll_loss(model(x), torch.randint(0, 3, (16,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
"""


def check(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "gradsight",
        "check",
        *map(str, options),
        str(folder / "train.py"),
    ]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=settings)


@pytest.mark.slow
def test_the_report_names_line_and_sample(tmp_path: Path) -> None:
    done = check(tmp_path, "--run_dir", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    shown = " ".join(done.stdout.split())
    assert "cause: log in train.py:12 (`return torch.log(self.head(x).softmax(1))`)" in shown
    assert "sample 7: gradient not finite, even as a batch of one" in shown
    assert "kept: incidents/step12-GS103" in shown
    without_paths = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, without_paths)) <= 80
    (incident,) = gradsight.open_run(tmp_path / "run").incidents()
    assert incident.diagnosis is not None
    assert incident.diagnosis.operation is not None
    assert incident.diagnosis.operation.place == f"{tmp_path / 'train.py'}:12"
    report = (tmp_path / "run" / "report.md").read_text()
    assert "   - Cause: log in train.py:12" in report
    assert "   - Kept in `incidents/step12-GS103`" in report
    told = json.loads((tmp_path / "run" / "check.json").read_text())
    (finding,) = told["models"]["model"]["findings"]
    assert finding["diagnosis"]["operation"]["operation"] == "log"
    assert finding["diagnosis"]["samples"][0]["row"] == 7


@pytest.mark.slow
def test_what_is_not_kept_is_not_pointed_at(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 2, done.stderr
    assert "sample 7: gradient not finite, even as a batch of one" in " ".join(done.stdout.split())
    assert "kept:" not in done.stdout
