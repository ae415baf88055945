"""Every command on an output that is not UTF-8: ASCII instead of a traceback; files stay UTF-8."""

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli.small_demo import SMALL
from gradsight.cli import main
from gradsight.cli.demo import perform
from gradsight.show.encoding import in_ascii, never_fail_to_encode
from gradsight.show.text import wants_colour

SHORT = replace(SMALL, steps=24, poisoned_step=20)
SCRIPT = """
import torch
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def build():
    torch.manual_seed(0)
    return Net(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))), (torch.ones(256, 64),)

if __name__ == "__main__":
    model, (x,) = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(x * (float("nan") if step == 3 else 1.0))
        loss.backward()
        optimizer.step()
"""
Written = Callable[..., tuple[int, str]]


@pytest.fixture(params=["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Runs a command on outputs of that encoding; gives its exit code and all it wrote."""

    def run(*tokens: object) -> tuple[int, str]:
        out = io.TextIOWrapper(io.BytesIO(), encoding=request.param)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        try:
            code = main([str(token) for token in tokens])
            out.flush()
        finally:
            monkeypatch.undo()
        return code, out.buffer.getvalue().decode(request.param)  # type: ignore[attr-defined]

    return run


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("script") / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo whose output is ASCII; what it wrote is in out.txt beside its run."""
    folder = tmp_path_factory.mktemp("demo")
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    never_fail_to_encode(out)
    before = sys.stdout
    sys.stdout = out
    try:
        assert perform(SHORT, folder / "run") == 0
        out.flush()
    finally:
        sys.stdout = before
    (folder / "out.txt").write_bytes(raw.getvalue())
    return folder / "run"


def test_signs_and_letters() -> None:
    assert in_ascii("✓ ✗ ⚠️ ✅ ❌ ≥ 3 … – é") == "[ok] [!!] [!] [ok] [!!] >= 3 ~ - e"
    curve = "▁▂▃▄▅▆▇█"
    assert len(in_ascii(curve)) == len(set(in_ascii(curve))) == len(curve)
    assert in_ascii("\udcff") == "?"  # a file name that is not UTF-8


def test_the_demo(run_dir: Path) -> None:
    text = (run_dir.parent / "out.txt").read_text(encoding="ascii")
    assert "[ok] found: the step and the sample are right" in text


def test_the_record_of_a_run(run_dir: Path, written: Written) -> None:
    code, text = written("report", run_dir)
    assert code == 1
    assert "[!] GS201" in text
    assert "✅" in (run_dir / "report.md").read_text(encoding="utf-8")
    code, text = written("influence", run_dir)
    assert code == 0
    assert "#" in text  # its bars
    (incident,) = (run_dir / "incidents").iterdir()
    assert written("replay", incident)[0] == 0
    for tokens in (("list",), ("show",), ("show", "--parameter", "*"), ("verify",)):
        assert written("dump", tokens[0], run_dir, *tokens[1:])[0] == 0
    assert written("dump", "diff", run_dir, run_dir)[0] == 0


@pytest.mark.parametrize(
    "command", ["", "check", "demo", "dump", "influence", "memory", "replay", "report", "train"]
)
def test_help(command: str, written: Written) -> None:
    code, text = written(*command.split(), "--help")
    assert code == 0
    assert "Usage: gradsight" in text


def test_memory(script: Path, written: Written) -> None:
    code, text = written("memory", "verify", f"{script}:build")
    assert code == 0
    assert "VERIFICATION PASSED [ok]" in text
    assert written("memory", "predict", f"{script}:build")[0] == 0
    assert written("memory", "plan", f"{script}:build", "--budget", "1GB")[0] == 0


def test_training(tmp_path: Path, written: Written) -> None:
    code, text = written(
        *("train", "--max_steps", 1, "--batch_size", 2, "--block_size", 16, "--eval_samples", 2),
        *("--model.n_layer", 1, "--model.n_embd", 8, "--model.n_head", 1, "--device", "cpu"),
        *("--results_dir", tmp_path),
    )
    assert code == 0, text
    assert "[!!] Gradient checkpointing: DISABLED" in text


def test_wrong_usage(written: Written) -> None:
    code, text = written("report", "nowhere-ü→")
    assert code == 64
    assert "nowhere-" in text
    assert "->" in text
    assert written("train", "--batchsize", "4")[0] == 64


@pytest.mark.parametrize("command", [pytest.param("check", marks=pytest.mark.slow), "report"])
def test_a_whole_process_in_the_c_locale(command: str, script: Path, run_dir: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    subject = {"check": script, "report": run_dir}[command]
    done = subprocess.run(
        [sys.executable, "-m", "gradsight", command, subject],
        capture_output=True,
        env={**environment, **plain},
    )
    assert b"Traceback" not in done.stderr
    assert b"[!" in done.stdout.decode("ascii").encode()
    assert done.returncode in (1, 2)


def test_a_dumb_terminal_gets_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        assert wants_colour(terminal)
        monkeypatch.setenv("TERM", "dumb")
        assert not wants_colour(terminal)
    os.close(master)
