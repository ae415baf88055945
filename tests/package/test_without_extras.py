"""The wheel in an environment without extras: every name and every command works there, or names
the extra that it needs before torch is imported."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import gradsight
from gradsight.cli import _COMMANDS

pytestmark = pytest.mark.slow

BIN = Path(sys.prefix) / "without-extras" / "bin"
"""Set up by `make unit`."""

SCRIPT = """
import torch
import gradsight

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[block() for _ in range(4)])
    return model, torch.randn(4096, 8), loss_fn

def block():
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))

def loss_fn(model, batch):
    return model(batch).square().mean()

if __name__ == "__main__":
    model, batch, _ = build()
    batch = batch[:16]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dump = gradsight.GradientDumper("run", step_interval=4)
    with gradsight.watch(model, optimizer, run_dir="run", dump=dump, recorder="batch") as watched:
        engine = gradsight.GhostEngine(model, loss_fn, batch, optimizer=optimizer, run_dir="run")
        for step in range(8):
            with engine.observe():
                loss = loss_fn(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss)
        engine.close()
        with torch.no_grad():
            model[2][0].weight.fill_(float("inf"))
        loss_fn(model, batch).backward()
        optimizer.step()
"""

EVERY_NAME = """
import importlib.util
import sys
import warnings

import gradsight

for extra in ("wandb", "tensorboard", "trackio", "transformers", "accelerate", "starlette"):
    assert importlib.util.find_spec(extra) is None, f"{extra} is installed"
assert "torch" not in sys.modules
for name in gradsight.__all__:
    assert getattr(gradsight, name) is not None, name

import torch

model = torch.nn.Linear(3, 2)
for sink in ("wandb", "tensorboard", "trackio"):
    try:
        gradsight.watch(model, run_dir="sunk", sinks=[sink])
    except gradsight.GradsightError as error:
        print(error)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tracker = gradsight.MetricsTracker("tracked", use_wandb=True)
    model(torch.ones(1, 3)).sum().backward()
    norms = gradsight.log_gradient_distribution(model, tracker, 0, log_histogram=True)
    tracker.close()
print(*(warning.message for warning in caught), sep="\\n")
assert norms.keys() == {"weight", "bias"}
"""

COMMANDS = {
    "check": (["check", "--steps", "4", "script.py"], 0),
    "preflight": (["preflight", "script.py:build"], 0),
    "report": (["report", "run"], 2),
    "explain": (["explain", "GS103"], 0),
    "findings": (["findings", "run"], 2),
    "verify": (["verify", "run"], 0),
    "run": (["run", "--run_dir", "recorded", "script.py"], 0),
    "compare": (["compare", "run", "run"], 0),
    "influence": (["influence", "run"], 0),
    "dump list": (["dump", "list", "run"], 0),
    "dump show": (["dump", "show", "run"], 0),
    "dump verify": (["dump", "verify", "run"], 0),
    "dump diff": (["dump", "diff", "run", "run"], 0),
    "replay": (["replay", "run/incidents/step8-GS103", "--build", "script.py:build"], 2),
    "memory verify": (["memory", "verify", "script.py:build"], 0),
    "memory predict": (["memory", "predict", "script.py:build"], 0),
    "memory plan": (["memory", "plan", "script.py:build", "--budget", "1GB"], 0),
}
"""Each command that needs no extra, and what it exits with."""

NEED_EXTRAS = {
    "train": (["train", "--max_steps", "1"], "hf"),
    "demo": (["demo"], "hf"),
    "memory verify": (["memory", "verify", "--architecture", "char"], "hf"),
    "memory predict": (["memory", "predict"], "hf"),
    "memory plan": (["memory", "plan", "--architecture", "char", "--budget", "1GB"], "hf"),
    "serve": (["serve", "run"], "serve"),
    "serve nothing": (["serve", "nowhere"], "serve"),
}
"""What stands on the built-in models, which are Hugging Face's, or on a web server."""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script, and the run that it made, in which the last step is infinite."""
    folder = tmp_path_factory.mktemp("without-extras")
    (folder / "script.py").write_text(SCRIPT)
    done = run(folder, "python", "script.py")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_in_it_is_the_one_just_built(folder: Path) -> None:
    where = run(folder, "python", "-c", "import gradsight; print(gradsight.__file__)").stdout
    here = Path(gradsight.__file__).parent
    there = Path(where.strip()).parent
    assert there.is_relative_to(BIN.parent)
    for file in here.rglob("*.py"):
        assert (there / file.relative_to(here)).read_bytes() == file.read_bytes()


def test_every_public_name(folder: Path) -> None:
    done = run(folder, "python", "-c", EVERY_NAME)
    assert done.returncode == 0, done.stderr
    for extra in ("wandb", "tensorboard", "trackio"):
        assert f"pip install 'gradsight[{extra}]'" in done.stdout


def test_the_tables_name_every_command(folder: Path) -> None:
    listed = {name.split()[0] for name in [*COMMANDS, *NEED_EXTRAS]}
    assert listed == _COMMANDS.keys()
    for group in ("dump", "memory"):
        text = run(folder, "gradsight", group, "--help").stdout
        for name in [name for name in COMMANDS if name.startswith(f"{group} ")]:
            assert name.split()[1] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_extras(name: str, folder: Path) -> None:
    arguments, code = COMMANDS[name]
    done = run(folder, "gradsight", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", NEED_EXTRAS)
def test_a_missing_extra_is_named_at_once(name: str, folder: Path) -> None:
    arguments, extra = NEED_EXTRAS[name]
    done = run(folder, "python", "-X", "importtime", "-m", "gradsight", *arguments)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 64
    assert f"pip install 'gradsight[{extra}]'" in " ".join(said)
    assert "gradsight.cli" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    "name", sorted({*COMMANDS, *NEED_EXTRAS, "dump", "memory"} - {"serve nothing"})
)
def test_help_needs_nothing(name: str, folder: Path) -> None:
    done = run(folder, "python", "-X", "importtime", "-m", "gradsight", *name.split(), "--help")
    assert done.returncode == 0
    assert f"gradsight {name}" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.endswith(" torch")]


def test_it_says_which_versions_are_at_work(folder: Path) -> None:
    said = run(folder, "gradsight", "--version").stdout
    assert importlib.metadata.version("gradsight") in said
    assert importlib.metadata.version("torch") in said
