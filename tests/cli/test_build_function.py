"""A build function named on the command line: its file is imported, and must not train by that."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsight.cli.build_function import load_build
from gradsight.errors import UsageError, UserCodeError

HEAD = """
import os, sys, torch
from pathlib import Path
model = torch.nn.Linear(3, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def build(): return model, (torch.zeros(1, 3),)
def touch(): Path(__file__).with_name("touched").touch()
"""
SEEN_BEFORE = {
    "a loop": "touch()\nfor _ in range(2):\n    model(torch.ones(1, 3)).sum().backward()\n",
    "a step": "touch()\nopt.step()\n",
    "a function": "touch()\ndef main():\n    loss().backward()\nmain()\n",
    "two functions": (
        "touch()\ndef main():\n    for _ in (1,): epoch()\n"
        "def epoch():\n    model(torch.ones(1, 3)).sum().backward()\nmain()\n"
    ),
    "a class": "touch()\nclass Run:\n    model(torch.ones(1, 3)).sum().backward()\n",
    "an else": "touch()\nif __name__ == '__main__': pass\nelse: opt.step()\n",
}
SEEN_RUNNING = {
    "a name for it": "go = opt.step\ngo()\ntouch()\n",
    "swallowed": (
        "b = torch.autograd.backward\ntry: b(model(torch.ones(1, 3)).sum())\n"
        "except Exception: pass\ntouch()\n"
    ),
    "a method": (
        "class Run:\n    def go(self): model(torch.ones(1, 3)).sum().backward()\n"
        "Run().go()\ntouch()\n"
    ),
    "another file": "import neighbour\nneighbour.train(model)\ntouch()\n",
}


def written(folder: Path, text: str) -> str:
    (folder / "neighbour.py").write_text(
        "import torch\ndef train(model): model(torch.ones(1, 3)).sum().backward()\n"
    )
    (folder / "train.py").write_text(HEAD + text)
    return f"{folder / 'train.py'}:build"


@pytest.mark.parametrize("case", [*SEEN_BEFORE, *SEEN_RUNNING])
def test_a_file_that_trains_when_it_is_read_is_refused(case: str, tmp_path: Path) -> None:
    place = written(tmp_path, (SEEN_BEFORE | SEEN_RUNNING)[case])
    with pytest.raises(UsageError, match=r"\.py:\d+ trains when the file is read.*__main__"):
        load_build(place)
    assert not (tmp_path / "touched").exists()
    # Everything is as it was: training goes on elsewhere.
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.sum().backward()
    optimizer.step()
    assert parameter.item() == 0.0


def test_the_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.py:10 trains"):
        load_build(written(tmp_path, SEEN_BEFORE["a loop"]))
    with pytest.raises(UsageError, match=r"neighbour\.py:2 trains"):
        load_build(written(tmp_path, SEEN_RUNNING["another file"]))


GUARDED = """
from __future__ import annotations
import argparse, sys, torch
from dataclasses import dataclass

@dataclass
class Options:
    width: int = 3

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()
assert sys.argv == [__file__], sys.argv
model = torch.nn.Linear(Options().width, 2)

def build():
    import neighbour
    assert neighbour.train
    assert parser.parse_args().lr == 0.1
    return model, (torch.zeros(1, 3),)

def main():
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()

if __name__ == "__main__":
    main()
"""


def test_a_guarded_script_is_given_no_arguments_and_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "")
    (tmp_path / "train.py").write_text(GUARDED)
    monkeypatch.setattr(sys, "argv", ["gradsight", "replay", "somewhere", "--build", "x"])
    path = list(sys.path)
    built: Any = load_build(f"{tmp_path / 'train.py'}:build")()
    assert isinstance(built[0], torch.nn.Linear)
    assert (sys.argv[1], sys.path) == ("replay", path)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("sys.exit(4)", UserCodeError, r"train.py ended when it was read \(sys.exit: 4\)"),
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('x'); p.parse_args()",
         UserCodeError, "ended when it was read .*it is given no arguments here"),
        ("def build(): sys.exit()", UserCodeError, "train.py:build ended"),
        ("1 +", UsageError, "train.py is not Python: invalid syntax"),
        ("raise KeyError('lost')", UserCodeError, "train.py raised KeyError when it was read"),
    ],
)  # fmt: skip
def test_files_that_end_or_fail(text: str, error: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        load_build(written(tmp_path, text))()
