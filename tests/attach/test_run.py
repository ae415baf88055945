"""gradsight run: a record of a script that knows nothing of it, and nothing else is changed."""

import os
import subprocess
from pathlib import Path

import pytest

import gradsight
import warm
from attach import scripts

OWN_LINE = """
import torch, gradsight
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with gradsight.watch(net, optimizer, run_dir="own", quiet=True):
    for step in range(5):
        net(torch.randn(3, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(len(list(gradsight.open_run("own").steps())))
"""
NEVER_STEPS = """
import torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.randn(3, 4)).mean().backward()
print("no step")
"""
FAILS = """
import sys, torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    net(torch.randn(3, 4)).mean().backward()
    optimizer.step()
print(sys.argv[1:])
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    net(torch.randn(3, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
SHARDED = RANKS.replace(
    "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))",
    "fully_shard(torch.nn.Linear(4, 1))",
).replace("import", "from torch.distributed.fsdp import fully_shard\nimport", 1)


def run(*tokens: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a warm process; the script that it starts gets a new interpreter."""
    command = ["-m", "gradsight", "run", *tokens]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return warm.run(command, capture_output=True, text=True, cwd=cwd, env=settings)


def script(folder: Path, text: str) -> Path:
    (folder / "train.py").write_text(text)
    return folder / "train.py"


def test_output_arguments_and_exit_code_are_the_script_s(tmp_path: Path) -> None:
    plain = warm.run(
        [script(tmp_path, FAILS), "--run_dir", "x", "-v"], capture_output=True, text=True
    )
    done = run("--run_dir", tmp_path / "run", "train.py", "--run_dir", "x", "-v", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (7, plain.stdout, plain.stderr)
    steps = list(gradsight.open_run(tmp_path / "run").steps())
    assert [step.step for step in steps] == [0, 1, 2]
    assert {step.gradient for step in steps} == {"true"}


@pytest.mark.slow
def test_several_models_are_one_run(tmp_path: Path) -> None:
    done = run("--run_dir", "run", script(tmp_path, scripts.ADVERSARIES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {stat.parameter for stat in gradsight.open_run(tmp_path / "run").parameter_stats()}
    assert len(names) == 8
    assert {name.split(".")[0] for name in names} == {"maker", "critic"}


@pytest.mark.slow
def test_a_line_in_the_script_and_run_make_one_record(tmp_path: Path) -> None:
    done = run("--run_dir", "given", script(tmp_path, OWN_LINE), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
    assert len(list(tmp_path.glob("*/run.sqlite"))) >= 1
    assert (tmp_path / "given").resolve() == tmp_path / "own"
    assert len(list(gradsight.open_run(tmp_path / "given").steps())) == 5


@pytest.mark.slow
def test_a_process_that_never_steps_writes_nothing(tmp_path: Path) -> None:
    done = run("--run_dir", "run", script(tmp_path, NEVER_STEPS), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "no step\n"), done.stderr
    assert sorted(os.listdir(tmp_path)) == ["train.py"]


@pytest.mark.parametrize(
    "text", [RANKS, SHARDED, SHARDED.replace("dist.destroy_process_group()", "")]
)
@pytest.mark.slow
def test_every_rank_of_a_launcher_is_in_one_record(text: str, tmp_path: Path) -> None:
    """With its last step, which the ranks may still be exchanging when the script ends."""
    launcher = ["torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2"]
    done = run("--run_dir", "run", *launcher, script(tmp_path, text), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    opened = gradsight.open_run(tmp_path / "run")
    assert opened.config["world_size"] == 2
    assert [step.step for step in opened.steps()] == [0, 1, 2, 3]


@pytest.mark.slow
def test_without_a_directory_a_new_one_is_said(tmp_path: Path) -> None:
    script(tmp_path, FAILS)
    for name in ("train", "train-2"):
        done = run("train.py", cwd=tmp_path)
        assert f"gradsight: recording into runs/{name}" in done.stderr
        assert len(list(gradsight.open_run(tmp_path / "runs" / name).steps())) == 3


@pytest.mark.slow
def test_switched_off_the_script_runs_as_it_is(tmp_path: Path) -> None:
    done = run("--run_dir", "run", script(tmp_path, FAILS), cwd=tmp_path, GRADSIGHT="0")
    assert done.returncode == 7
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [["nowhere.py"], [""], ["."], []])
def test_wrong_usage(given: list[str], tmp_path: Path) -> None:
    assert run(*given, cwd=tmp_path).returncode == 64


@pytest.mark.slow
def test_check_stops_at_the_first_critical_finding(tmp_path: Path) -> None:
    text = scripts.UNCLEARED.replace("range(20)", "range(10_000)")
    command = ["-m", "gradsight", "check", "--stop-on", "critical", "--run_dir", tmp_path / "run"]
    done = warm.run([*command, script(tmp_path, text)], capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(list(gradsight.open_run(tmp_path / "run").steps())) < 100
