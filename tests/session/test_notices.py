"""What a watched run says on standard error: little, once, and never at training's expense."""

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

from gradsight import watch
from gradsight.core.notices import notice
from launch import run_ranks


class Root(nn.Module):
    """A linear layer below a square root, whose input may be negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The negative input makes a NaN here."""
        return torch.sqrt(self.layer(x).abs() + x[:, :1])


def train(steps: int = 6, bad: tuple[int, ...] = (2, 4), **options: Any) -> None:
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, **options):
        for step in range(steps):
            x = torch.rand(4, 3) + 1
            if step in bad:
                x[1] = -100.0
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_first_critical_finding_is_said_once_with_cause_and_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "my runs"
    train(run_dir=run_dir)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gradsight: step 2: GS103 NaN gradient: sqrt in test_notices.py:")
    assert "(`return torch.sqrt(" in line
    assert "; sample 1. " in line
    kept = run_dir / "incidents" / "step2-GS103"
    assert kept.is_dir()
    assert line.endswith(f"Read on: gradsight report '{run_dir}' (kept: {kept})")


def test_without_a_record_it_says_where_the_report_is(capsys: pytest.CaptureFixture[str]) -> None:
    train(recorder=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gradsight: step 2: GS103 NaN gradient: ")
    assert line.endswith("Watch.report() has more; watch(..., run_dir=...) would keep it")


def test_quiet_healthy_and_unjudged_runs_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    train(quiet=True)
    train(bad=())
    train(health=False)
    assert capsys.readouterr().err == ""


class Unwritable(io.TextIOBase):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads this any more")


@pytest.mark.parametrize("broken", ["none", "closed", "unwritable", "no stream"])
def test_a_broken_standard_error_does_not_disturb_training(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    streams = {"none": None, "closed": closed, "unwritable": Unwritable(), "no stream": object()}
    monkeypatch.setattr(sys, "stderr", streams[broken])
    train()


def test_what_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    train(run_dir=None)
    assert b"GS103 NaN gradient: sqrt in" in raw.getvalue()
    notice("größer\nals \x1b[31m0")
    assert b"gradsight: gr\\xf6\\xdfer als \\x1b[31m0\n" in raw.getvalue()


def test_a_progress_bar_is_taken_away_and_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with tqdm(total=3, file=screen, ascii=True, ncols=40) as bar:
        bar.update(1)
        train()
        bar.update(1)
    lines = [line.split("\r")[-1] for line in screen.getvalue().split("\n")]
    assert [line.startswith("gradsight: step 2") for line in lines].count(True) == 1
    assert not any("it/s" in line for line in lines if "gradsight" in line)


def test_ranks_say_it_once(tmp_path: Path) -> None:
    printed = run_ranks(Path(__file__).with_name("ranks.py"), "nan", tmp_path)
    assert printed.count("gradsight: step 1: GS103 NaN gradient") == 1


def test_what_is_said_is_logged_too_and_not_said_twice(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    train(recorder=False)
    said = capsys.readouterr().err
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("gradsight", "WARNING")
    assert said == f"gradsight: {record.getMessage()}\n"


def test_a_log_handler_that_fails_is_not_felt(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log is full")

    broken = Broken()
    logging.getLogger("gradsight").addHandler(broken)
    try:
        notice("heard")
    finally:
        logging.getLogger("gradsight").removeHandler(broken)
