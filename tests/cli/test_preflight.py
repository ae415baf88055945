"""gradsight preflight: scripts that know nothing of us, and build functions."""

import json
from pathlib import Path
from typing import Any

import pytest

from gradsight.cli import main

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
if "softmax" in sys.argv:
    model.append(nn.Softmax(dim=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(16, 6)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :5].argmax(1)).backward()
    optimizer.step()
    print("step", step, "made")
"""

BUILD = """
import torch
from torch import nn
from torch.nn import functional as F


def build():
    torch.manual_seed(0)
    x = torch.randn(16, 6)
    return nn.Linear(6, 5), (x, x[:, :5].argmax(1)), lambda m, b: F.cross_entropy(m(b[0]), b[1])


def wrong():
    model, batch, _ = build()
    return model, batch, lambda m, b: F.cross_entropy(m(b[0]).softmax(1), b[1])


def fails():
    model, batch, _ = build()
    return model, batch, lambda m, b: m(b)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "parts.py").write_text(BUILD)
    return tmp_path


def findings(value: Any) -> list[dict[str, Any]]:
    """Every object with a code and a severity, wherever it stands."""
    if isinstance(value, dict):
        own = [value] if {"code", "severity"} <= value.keys() else []
        return own + [found for each in value.values() for found in findings(each)]
    if isinstance(value, list):
        return [found for each in value for found in findings(each)]
    return []


def test_a_script_is_ended_after_its_first_step(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = str(folder / "train.py")
    code = main(["preflight", "--json", "--run_dir", str(folder / "run"), script, "softmax"])
    out, err = capfd.readouterr()
    assert code == 1
    (finding,) = findings(json.loads(out))
    assert finding["code"] == "GS605"
    assert finding["first_step"] == 0
    assert {"parameters", "evidence"} <= finding.keys()
    assert "train.py:15" in finding["evidence"]
    assert "made" not in err
    assert (folder / "run" / "report.md").is_file()
    assert json.loads(out)["script"]["exit_code"] == 0


@pytest.mark.slow
def test_check_does_it_on_its_way_or_not(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = str(folder / "train.py")
    assert main(["check", "--json", script, "softmax"]) == 1
    (finding,) = findings(json.loads(capfd.readouterr().out))
    assert finding["code"] == "GS605"
    assert main(["check", "--json", "--no-preflight", script, "softmax"]) == 0
    assert findings(json.loads(capfd.readouterr().out)) == []


def test_a_build_function_is_judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = str(folder / "parts.py")
    assert main(["preflight", f"{parts}:build"]) == 0
    assert "healthy" in capsys.readouterr().out
    assert main(["preflight", "--json", "--run_dir", str(folder / "out"), f"{parts}:wrong"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [each["code"] for each in findings(answer)] == ["GS605"]
    assert answer["status"] == "warning"
    assert "GS605" in (folder / "out" / "report.md").read_text()


def test_one_batch_can_be_learned_or_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = str(folder / "parts.py")
    assert main(["preflight", "--overfit", "300", "--json", f"{parts}:build"]) == 0
    assert json.loads(capsys.readouterr().out)["overfit"]["learned"] is True
    assert main(["preflight", "--overfit", "1", f"{parts}:build"]) == 1
    assert "not learned" in capsys.readouterr().out


def test_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = str(folder / "parts.py")
    for tokens in (
        ["preflight", f"{parts}:nothing"],
        ["preflight", f"{parts}:build", "more"],
        ["preflight", str(folder / "missing.py")],
        ["preflight", "--overfit", "3", str(folder / "train.py")],
        ["preflight", "--overfit", "0", f"{parts}:build"],
    ):
        assert main(tokens) == 64, tokens
    assert main(["preflight", f"{parts}:fails"]) == 3
    capsys.readouterr()
