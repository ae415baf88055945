"""A cell that is run again: the watch that it left behind is closed, and the new one records."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from gradsight import open_run, watch
from gradsight.errors import UsageError


def cell(run_dir: Path | None, model: nn.Module | None = None) -> object:
    """A training that never closes its watch."""
    model = model or nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, run_dir=run_dir, start_step=0, quiet=True)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return watched


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a notebook is known by."""
    ipython = ModuleType("IPython")
    ipython.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.usefixtures("notebook")
def test_the_same_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = cell(tmp_path)
    again = cell(tmp_path)
    assert "left open is closed now" in capsys.readouterr().err
    assert first._closed  # type: ignore[attr-defined]
    again.close()  # type: ignore[attr-defined]
    assert [step.step for step in open_run(tmp_path).steps()] == [0, 1, 2]


@pytest.mark.usefixtures("notebook")
def test_the_same_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 1)
    held = []
    counts = []
    for _ in range(3):
        held.append(cell(None, model))
        counts.append(hooks_of(model))
    assert len(set(counts)) == 1
    assert [each._closed for each in held] == [True, True, False]  # type: ignore[attr-defined]
    held[-1].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().err.count("left open") == 2
    cell(None, model).close()  # type: ignore[attr-defined]
    assert "left open" not in capsys.readouterr().err, "a closed one was not left open"


@pytest.mark.usefixtures("notebook")
def test_another_model_in_another_place_is_left_alone(tmp_path: Path) -> None:
    first = cell(tmp_path / "a")
    second = cell(tmp_path / "b")
    assert not first._closed  # type: ignore[attr-defined]
    first.close()  # type: ignore[attr-defined]
    second.close()  # type: ignore[attr-defined]


def test_in_a_script_it_is_a_mistake(tmp_path: Path) -> None:
    first = cell(tmp_path)
    with pytest.raises(UsageError, match="already recording"):
        cell(tmp_path)
    first.close()  # type: ignore[attr-defined]
