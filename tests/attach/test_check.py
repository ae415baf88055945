"""gradsight check on scripts that know nothing of it: verdicts, exit codes, frameworks, launchers,
ways to die.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import gradsight
import warm
from attach import scripts
from gradsight.cli import main
from gradsight.cli.check import split_tokens


def write(folder: Path, text: str, extra: str = "pass", name: str = "train.py") -> Path:
    (folder / "neighbour.py").write_text("WIDTH = 6\n")
    (folder / name).write_text(text.replace("{extra}", extra))
    return folder / name


def check(
    *tokens: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a warm process; the script that it starts gets a new interpreter."""
    command = ["-m", "gradsight", "check", *tokens]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return warm.run(command, capture_output=True, text=True, cwd=cwd, env=settings)


@pytest.mark.slow
def test_a_healthy_script_with_arguments_neighbours_and_workers(tmp_path: Path) -> None:
    script = write(tmp_path, scripts.PLAIN)
    done = check("--run_dir", tmp_path / "run", script, "--lr", "0.1", "--workers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained with 0.1" in done.stdout
    assert "✅ healthy: no finding in 40 steps" in done.stdout
    assert (
        "SGD of classifier: made at train.py:19, steps at train.py:25, lr 0.1, no scheduler."
        in " ".join(done.stdout.split())
    )
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 79
    assert max(map(len, done.stdout.splitlines())) < 100
    assert "\033" not in done.stdout
    run = gradsight.open_run(tmp_path / "run")
    assert len(list(run.steps())) == 40
    assert {stat.parameter for stat in run.parameter_stats()} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    assert "## The script" in (tmp_path / "run" / "report.md").read_text()


def test_a_fault_is_found_fixed_and_gone(tmp_path: Path) -> None:
    script = write(tmp_path, scripts.UNCLEARED)
    done = check("--json", script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    told = json.loads(done.stdout)
    assert told["status"] == "critical"
    assert [finding["code"] for finding in told["models"]["model"]["findings"]] == ["GS305"]
    fixed = "optimizer.step()\n    optimizer.zero_grad()"
    script.write_text(script.read_text().replace("optimizer.step()", fixed))
    again = check("--steps", 15, "--json", script)
    assert again.returncode == 0, again.stdout
    assert json.loads(again.stdout)["models"]["model"]["steps"] == 15


@pytest.mark.slow
def test_the_very_first_loss_is_seen(tmp_path: Path) -> None:
    done = check("--json", write(tmp_path, scripts.TOO_LARGE))
    (told,) = json.loads(done.stdout)["models"].values()
    assert "GS108" in [finding["code"] for finding in told["findings"]], done.stdout


@pytest.mark.slow
def test_several_models_are_kept_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = check("--json", "--run_dir", tmp_path / "run", write(tmp_path, scripts.ADVERSARIES))
    assert done.returncode == 2, done.stderr
    models = json.loads(done.stdout)["models"]
    assert {name: report["status"] for name, report in models.items()} == {
        "maker": "critical",
        "critic": "critical",
    }
    first = {name: report["findings"][0]["first_step"] for name, report in models.items()}
    assert first["maker"] == 20
    assert (tmp_path / "run" / "critic" / "report.md").exists()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().out.count("report: ") == 2
    assert "## The script" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize(("kind", "model"), [("TRAINER", "Model"), ("LIGHTNING", "Model")])
@pytest.mark.slow
def test_frameworks(kind: str, model: str, tmp_path: Path) -> None:
    done = check("--json", "--steps", 20, write(tmp_path, getattr(scripts, kind)))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    (optimizer,) = result["optimizers"]
    assert optimizer["scheduler"] is (kind == "TRAINER")
    told = result["models"]
    assert list(told) == [model]
    assert (told[model]["steps"], told[model]["status"]) == (20, "healthy")


@pytest.mark.parametrize(
    "launcher",
    [
        ["--nproc_per_node", "2"],
        pytest.param(["torchrun", "--standalone", "--nproc_per_node", "2"], marks=pytest.mark.slow),
    ],
)
def test_ranks(launcher: list[str], tmp_path: Path) -> None:
    script = write(tmp_path, scripts.RANKS)
    done = check("--steps", 12, "--run_dir", tmp_path / "run", *launcher, script)
    assert done.returncode == 0, done.stdout + done.stderr
    run = gradsight.open_run(tmp_path / "run")
    assert run.config["world_size"] == 2
    assert len(list(run.steps())) == 12


@pytest.mark.slow
def test_accelerate_launch_on_two_processes(tmp_path: Path) -> None:
    script = write(tmp_path, scripts.ACCELERATED)
    # --multi_gpu is how accelerate starts several processes at all: with --cpu it starts one,
    # whatever --num_processes says
    launcher = [
        "accelerate",
        "launch",
        "--multi_gpu",
        "--num_processes",
        2,
        "--num_machines",
        1,
        "--mixed_precision",
        "no",
    ]
    launcher += ["--dynamo_backend", "no", "--main_process_port", 0]
    done = check("--json", "--run_dir", tmp_path / "run", *launcher, script, HF_HOME=str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert gradsight.open_run(tmp_path / "run").config["world_size"] == 2
    (told,) = json.loads(done.stdout)["models"].values()
    found = {finding["code"]: finding for finding in told["findings"]}
    assert (told["steps"], found["GS103"]["first_step"]) == (20, 15)
    assert "NaN or Inf on rank 1 alone" in found["GS503"]["evidence"]


@pytest.mark.parametrize(("who", "steps"), [("both", [7, 20]), ("children", [9])])
@pytest.mark.slow
def test_a_script_that_forks(who: str, steps: list[int], tmp_path: Path) -> None:
    done = check("--json", "--run_dir", tmp_path / "run", write(tmp_path, scripts.FORKS), who)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)["models"]
    assert sorted(report["steps"] for report in told.values()) == steps
    assert [step.step for step in gradsight.open_run(tmp_path / "run").steps()] == list(
        range(steps[-1])
    )
    assert ("this process was forked from one that is being recorded" in done.stderr) == (
        who == "both"
    )


@pytest.mark.slow
def test_a_script_that_starts_another(tmp_path: Path) -> None:
    script = write(tmp_path, scripts.UNCLEARED, name="inner.py")
    done = check("--json", write(tmp_path, scripts.STARTS_ANOTHER), script)
    assert done.returncode == 2, done.stdout + done.stderr
    (told,) = json.loads(done.stdout)["models"].values()
    assert (told["steps"], [finding["code"] for finding in told["findings"]]) == (20, ["GS305"])


@pytest.mark.parametrize(
    ("extra", "code", "expected", "text"),
    [
        pytest.param(
            "if step == 15: raise RuntimeError('out of luck')",
            1,
            3,
            "The script failed with exit code 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "if step == 15: __import__('sys').exit(7)",
            7,
            3,
            "The script failed with exit code 7",
            marks=pytest.mark.slow,
        ),
        (
            "if step == 15: __import__('os').kill(__import__('os').getpid(), 9)",
            -9,
            3,
            "was killed by signal 9",
        ),
        pytest.param(
            "if step == 15: classifier[0].weight.data.fill_(float('nan'))\n        if step == 19: raise SystemExit(5)",
            5,
            2,
            "GS103",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raises", "sys.exit", "kill -9", "NaN, then exit"],
)
def test_a_script_that_dies_is_still_reported(
    extra: str, code: int, expected: int, text: str, tmp_path: Path
) -> None:
    done = check("--run_dir", tmp_path / "run", write(tmp_path, scripts.PLAIN, extra))
    assert done.returncode == expected, done.stdout + done.stderr
    assert text in done.stdout
    assert "gradsight: step" not in done.stderr, "findings are printed once, at the end"
    assert json.loads((tmp_path / "run" / "check.json").read_text())["script"]["exit_code"] == code
    assert len(list(gradsight.open_run(tmp_path / "run").steps())) >= 14


@pytest.mark.slow
def test_fail_on_forgives(tmp_path: Path) -> None:
    script = write(tmp_path, scripts.UNCLEARED)
    assert check("--fail-on", "never", script).returncode == 0


@pytest.mark.slow
def test_settings_from_a_file_and_the_users_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "health.toml").write_text("GS305 = false\n")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('the users own ran')\n")
    script = write(tmp_path, scripts.UNCLEARED)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = check("--health", tmp_path / "health.toml", script, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the users own ran" in done.stdout


def test_a_script_without_an_optimizer(tmp_path: Path) -> None:
    done = check(write(tmp_path, "print('hello')\n"))
    assert done.returncode == 1
    assert "no optimizer step was seen" in done.stdout


@pytest.mark.slow
def test_options_behind_the_script_are_the_scripts(tmp_path: Path) -> None:
    done = check(write(tmp_path, scripts.PLAIN), "--steps", "5")
    assert done.returncode == 3
    assert "--steps went to the script: options of gradsight check come before SCRIPT" in " ".join(
        done.stdout.split()
    )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (
            ["no-such-launcher", "x.py"],
            "there is no script no-such-launcher, and no launcher of that name",
        ),
        (["."], "is a directory; give a training script"),
        (["--steps", "0", "good.py"], "--steps must be 1 or more, got 0"),
        (["--nproc_per_node", "0", "good.py"], "--nproc_per_node must be 1 or more, got 0"),
        (["prose.py"], "prose.py is not Python, line 1"),
        ([""], "the script's name is empty"),
        (["book.ipynb"], "book.ipynb is a notebook; make a script of it: jupyter nbconvert"),
        (["--run_dir", "good.py", "good.py"], "good.py is a file; give a directory"),
        (["--run_dir", "good.py/run", "good.py"], "good.py/run cannot be made: Not a directory"),
        (["--health", "none.toml", "good.py"], "the health settings none.toml cannot be read"),
    ],
)
def test_wrong_usage(
    tokens: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.py").write_text("raise SystemExit('this was run')\n")
    Path("prose.py").write_text("This is not a program.\n")
    assert main(["check", *tokens]) == 64
    assert message in capsys.readouterr().err
    assert not Path("x").exists()


@pytest.mark.parametrize("command", ["check", "replay"])
def test_help_shows_one_spelling(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options are taken with hyphens and with underscores, and shown once."""
    assert main([command, "--help"]) == 0
    shown = re.findall(r"--[a-z][a-z_-]+", capsys.readouterr().out)
    spelled = {option.replace("-", "_") for option in shown}
    assert len(spelled) == len(set(shown))


def test_only_what_stands_before_the_script_is_ours() -> None:
    assert split_tokens(["check", "--json", "a.py", "--json"]) == [
        "check",
        "--json",
        "--",
        "a.py",
        "--json",
    ]
    assert split_tokens(["check", "--run_dir=x", "--fail-on", "never", "a.py"]) == [
        "check",
        "--run_dir=x",
        "--fail-on",
        "never",
        "--",
        "a.py",
    ]
    assert split_tokens(["check", "--run-dir", "x", "a.py"]) == [
        "check",
        "--run-dir",
        "x",
        "--",
        "a.py",
    ]
    assert split_tokens(["check", "--help"]) == ["check", "--help"]


MODULE = """
import sys
from ..model import WIDTH
import torch

print(sys.argv[1:], sys.path[0], __name__, __package__, sys.stdin.read())
model = torch.nn.Linear(WIDTH, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "options", [[], pytest.param(["--nproc_per_node", "1"], marks=pytest.mark.slow)], ids=str
)
def test_a_module_runs_as_under_python_m(options: list[str], tmp_path: Path) -> None:
    package = tmp_path / "project" / "inner"
    package.mkdir(parents=True)
    (package.parent / "model.py").write_text("WIDTH = 6\n")
    (package / "train.py").write_text(MODULE)
    given = ["-m", "project.inner.train", "--run_dir", "mine", "--json"]
    plain = warm.run(given, capture_output=True, text=True, cwd=tmp_path, input="typed")
    command = ["-m", "gradsight", "check", "--run_dir", "record", *options, *given]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=settings, input="typed"
    )
    assert done.returncode == plain.returncode == 0, done.stderr + plain.stderr
    (line,) = plain.stdout.splitlines()
    assert done.stdout.splitlines()[0] == line
    assert "__main__ project.inner typed" in line
    assert "healthy: no finding in 12 steps" in done.stdout
    assert (tmp_path / "record" / "report.md").exists()
    assert not (tmp_path / "mine").exists()


def test_the_name_of_a_module_without_m_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["check", "package.train"]) == 64
    assert "for the module, type -m package.train" in " ".join(capsys.readouterr().err.split())


def test_a_script_called_gradsight_runs_once(tmp_path: Path) -> None:
    text = scripts.UNCLEARED.replace("optimizer.step()", "optimizer.step()\n    model.zero_grad()")
    script = write(tmp_path, f"{text}\nprint('trained')\n", name="gradsight.py")
    done = check(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained") == 1
    assert "healthy: no finding in 20 steps" in done.stdout
    assert "cannot watch" not in done.stderr


@pytest.mark.slow
def test_arguments_of_torchrun_are_not_taken_for_gradsight_s(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys\nsys.exit(5)\n")
    done = check("torchrun", "--standalone", "--nproc_per_node", "2", script)
    assert done.returncode == 3
    assert "went to the script" not in done.stdout


OWN_UPDATES = """
import torch
weight = torch.randn(4, 1, requires_grad=True)
for _ in range(30):
    loss = (torch.randn(8, 4) @ weight - 1).square().mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.01 * weight.grad
        weight.grad = None
"""


def test_a_script_that_updates_its_weights_itself_is_told_what_was_seen(tmp_path: Path) -> None:
    done = check("--run_dir", tmp_path / "run", write(tmp_path, OWN_UPDATES))
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert "Gradsight saw 30 backward passes, but no torch optimizer" in text
    assert "gradsight.watch(model)" in text


WRAPPED = """
import torch
from wrapper import Scheduled
model = torch.nn.Linear(4, 1)
scheduled = Scheduled(torch.optim.Adam(model.parameters(), lr=1e-3))
for _ in range(20):
    (model(torch.randn(8, 4)) - 1).square().mean().backward()
    scheduled.advance()
"""
WRAPPER = """
class Scheduled:
    def __init__(self, inner):
        self.inner = inner

    def advance(self):
        self.inner.step()
        self.inner.zero_grad()
"""


@pytest.mark.slow
def test_the_place_of_an_optimizer_is_the_loops_not_a_wrappers(tmp_path: Path) -> None:
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    done = check(write(tmp_path, WRAPPED))
    assert "made at train.py:5, steps at train.py:8" in done.stdout, done.stdout + done.stderr
