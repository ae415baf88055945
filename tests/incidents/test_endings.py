"""Incidents of runs that end: exceptions, and disks that take nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
import warm
from gradsight.cli import main
from gradsight.errors import GradsightWarning
from incidents.faults import FAULTS, train
from launch import TESTS

LOOP = """
import sys
import torch
from torch import nn
import gradsight

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
watch = gradsight.watch(model, optimizer, run_dir=sys.argv[1], recorder={recorder!r})
for step in range(1_000_000):
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    if step == 4:
        {then}
    optimizer.step()
    optimizer.zero_grad()
"""


def loop(folder: Path, then: str, recorder: object = True) -> subprocess.CompletedProcess[str]:
    script = folder / "loop.py"
    script.write_text(LOOP.replace("{then}", then).replace("{recorder!r}", repr(recorder)))
    return warm.run([script, folder / "run"], capture_output=True, text=True)


def body(incident: Any) -> dict[str, Any]:
    document = json.loads((Path(incident.path) / "incident.json").read_text())
    return document["incident"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_an_exception_nobody_catches_leaves_one_with_the_batch(tmp_path: Path) -> None:
    done = loop(tmp_path, "raise KeyError('gone')", recorder="batch")
    assert done.returncode == 1
    assert "KeyError: 'gone'" in done.stderr
    (incident,) = gradsight.open_run(tmp_path / "run").incidents()
    assert (incident.step, incident.code) == (4, "exception")
    assert incident.reason == f"KeyError: 'gone' ({tmp_path / 'loop.py'}:15)"
    assert incident.replayable
    assert {"batch.safetensors", "parameters.safetensors"} <= set(os.listdir(incident.path))


def test_an_exception_through_the_watch_keeps_the_diagnosis(tmp_path: Path) -> None:
    """The user's own guard raises before the optimizer steps: no judge has spoken, but the cause is
    known.
    """
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def guarded() -> None:
        with gradsight.watch(model, optimizer, run_dir=tmp_path):
            for step in range(9):
                x = torch.randn(6, 4)
                x[1, 2] = float("nan") if step == 3 else 0.0
                model(x).square().mean().backward()
                if not all(
                    p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
                ):
                    raise FloatingPointError("a gradient is not finite")
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(FloatingPointError):
        guarded()
    (incident,) = gradsight.open_run(tmp_path).incidents()
    assert (incident.step, incident.code) == (3, "exception")
    assert incident.diagnosis is not None
    assert [sample.row for sample in incident.diagnosis.samples] == [1]
    assert not incident.replayable
    assert (
        main(["report", str(tmp_path)]) == 0
    )  # no step was judged bad: the user's own guard came first
    report = (tmp_path / "report.md").read_text()
    assert "- step 3, exception: FloatingPointError: a gradient is not finite (" in report
    assert "  - sample 1: gradient not finite, even as a batch of one" in report
    assert set(os.listdir(incident.path)) == {"incident.json"}


def test_an_exception_of_the_model_is_kept_with_its_own_call_and_replayed(
    tmp_path: Path, capsys: Any
) -> None:
    """The second micro-batch asks for a row that is not there; no gradient has come back to it yet."""
    code = "import torch\n\n\ndef build():\n    return torch.nn.Embedding(10, 2), None\n"
    (tmp_path / "model.py").write_text(code)
    model = nn.Embedding(10, 2)
    with (
        pytest.raises(IndexError),
        gradsight.watch(
            model, torch.optim.SGD(model.parameters()), run_dir=tmp_path, recorder="batch"
        ),
    ):
        for tokens in ([1, 2, 3], [4, 11, 6]):
            model(torch.tensor(tokens)).sum().backward()
    (incident,) = gradsight.open_run(tmp_path).incidents()
    assert (incident.step, incident.code) == (0, "exception")
    assert len(body(incident)["passes"]) == 2
    assert main(["replay", incident.path, "--build", f"{tmp_path / 'model.py'}:build"]) == 2
    assert "raised IndexError: index out of range in self" in " ".join(
        capsys.readouterr().out.split()
    )


def test_leaving_early_is_no_incident(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(KeyboardInterrupt), gradsight.watch(model, run_dir=tmp_path) as watch:
        model(torch.ones(1, 2)).sum().backward()
        watch.step()
        raise KeyboardInterrupt
    assert list(gradsight.open_run(tmp_path).incidents()) == []


def test_the_default_writes_no_data_of_the_users(tmp_path: Path) -> None:
    fault = FAULTS["NaN in a sample"]
    train(fault, lambda model, optimizer: gradsight.watch(model, optimizer, run_dir=tmp_path))
    (incident,) = gradsight.open_run(tmp_path).incidents()
    assert set(os.listdir(incident.path)) == {"incident.json"}
    assert "passes" not in body(incident)
    assert body(incident)["replay"].startswith("the batch was not written")


def test_a_folder_that_cannot_be_written_costs_the_incident_alone(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("a file is in the way")
    fault = FAULTS["NaN in a sample"]
    with pytest.warns(GradsightWarning, match="an incident could not be written: .*incidents"):
        train(
            fault,
            lambda model, optimizer: gradsight.watch(
                model, optimizer, run_dir=tmp_path, recorder="batch"
            ),
        )
    run = gradsight.open_run(tmp_path)
    assert len(list(run.steps())) == fault.steps
    (finding,) = [finding for finding in run.findings() if finding.code == "GS103"]
    assert finding.diagnosis is not None
    assert [sample.row for sample in finding.diagnosis.samples] == [11]
    assert [problem.key for problem in run.problems()] == ["incident"]


FULL = """
import resource, signal, sys, warnings
import torch
import gradsight
from launch import TESTS
from incidents.faults import FAULTS, train

warnings.simplefilter("ignore")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
fault = FAULTS["NaN in a sample"]
small = fault.build


def build():
    model = small()
    model.register_buffer("table", torch.zeros(500_000))
    return model


fault.build = build
train(fault, lambda model, optimizer: gradsight.watch(model, optimizer, run_dir=sys.argv[1], recorder="batch"))
"""


def test_a_full_disk_costs_the_incident_alone(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the parameters of this model do not
    get through.
    """
    (tmp_path / "full.py").write_text(FULL)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [tmp_path / "full.py", tmp_path / "run"]
    done = warm.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    run = gradsight.open_run(tmp_path / "run")
    assert len(list(run.steps())) == 8
    (problem,) = run.problems()
    assert problem.message.startswith("an incident could not be written: ")
    assert "File too large" in problem.message
    (finding,) = [finding for finding in run.findings() if finding.code == "GS103"]
    assert finding.diagnosis is not None
    assert finding.diagnosis.samples[0].row == 11
    assert list(run.incidents()) == []
    assert not list((tmp_path / "run").rglob("*.partial"))


def test_the_ways_out_of_a_script_are_as_before_when_the_watch_is_closed() -> None:
    model = nn.Linear(4, 1)
    before = sys.exit, type(exit).__call__
    with gradsight.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True) as watched:
        assert sys.exit is not before[0]
        for status in (None, 0, "failed"):
            with pytest.raises(SystemExit) as raised:
                sys.exit(status)
            assert raised.value.code == status
        assert watched.report().findings == ()
    assert (sys.exit, type(exit).__call__) == before
