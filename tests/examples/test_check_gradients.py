"""Seed 4: one look, its limits and fixes, trends, the picture, the report, and the command."""

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import gradsight
import warm
from examples.seed_lines import proves
from gradsight import check_gradient_health
from gradsight.cli import main
from gradsight.health.registry import CHECKS

EXAMPLE = Path(__file__).parents[2] / "examples" / "check_gradients"
COMMAND = EXAMPLE / "check-gradients.md"


def with_gradients(**gradients: Sequence[float]) -> nn.Module:
    model = nn.Module()
    for name, values in gradients.items():
        parameter = nn.Parameter(torch.zeros(len(values)))
        parameter.grad = torch.tensor(values)
        model.register_parameter(name, parameter)
    return model


def codes(report: Any) -> set[str]:
    return {finding.code for finding in report.findings}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def shell(command: str, folder: Path, **names: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell that calls `gradsight`, in a warm process."""
    program, *arguments = Template(command).substitute(names).split()
    assert program == "gradsight"
    return python("-m", "gradsight", *arguments, folder=folder)


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return warm.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)


# Step 1: one look.


@proves(
    4, "after `loss.backward()`, before `optimizer.step()`: `check_gradient_health(model, step)`"
)
@proves(
    4,
    "prints `  NaN gradient in: <name>` for each, then `Step N: grad_norm=..., nan=..., zero=...`",
)
@proves(
    4,
    "gives `total_norm`, `nan_count`, `zero_count`, `num_params`",
    "as written, and a `HealthReport` with findings",
)
def test_one_look(capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    model = with_gradients(a=[3.0], b=[4.0, 0.0], c=[0.0])
    results = check_gradient_health(model, 7)
    assert capsys.readouterr().out == "Step 7: grad_norm=5.0000, nan=0, zero=1\n"
    assert dict(results) == {"total_norm": 5.0, "nan_count": 0, "zero_count": 1, "num_params": 3}
    check_gradient_health(with_gradients(a=[1.0], b=[math.nan]), 8)
    assert capsys.readouterr().out.splitlines() == [
        "  NaN gradient in: b",
        "Step 8: grad_norm=nan, nan=1, zero=0",
    ]


# Step 2: what it means.


@proves(4, "grad_norm 0.1 to 10: healthy")
@proves(4, "grad_norm > 100: warning, add clipping (max_norm=1.0)")
@proves(4, "grad_norm > 1000: critical, clip at once, reduce LR")
@proves(4, "grad_norm < 0.001: warning, check architecture, initialization")
@proves(4, "grad_norm = 0: critical, check frozen params, dead ReLUs")
@proves(4, "nan_count > 0: critical, check loss function, reduce LR")
@pytest.mark.parametrize(
    ("norm", "status", "advice"),
    [
        (0.1, "healthy", ()),
        (10.0, "healthy", ()),
        (101.0, "warning", ("max_norm=1.0",)),
        (1001.0, "critical", ("Clip the gradient at once", "lower the learning rate")),
        (0.0009, "warning", ("initialisation", "architecture")),
        (0.0, "critical", ("frozen", "ReLU")),
        (math.nan, "critical", ("loss", "learning rate")),
    ],
)
def test_the_limits_of_the_norm(norm: float, status: str, advice: Sequence[str]) -> None:
    report = check_gradient_health(with_gradients(weight=[norm]), quiet=True)
    assert report.status == status
    said = report.to_markdown()
    assert all(words in said for words in advice), said


@proves(4, "zero_count > 50%: warning, check initialization, use LeakyReLU")
def test_many_parameters_at_zero() -> None:
    report = check_gradient_health(with_gradients(a=[1.0], b=[0.0], c=[0.0]), quiet=True)
    assert (report.status, codes(report)) == ("warning", {"GS107"})
    assert "LeakyReLU" in report.to_markdown()
    assert "initialisation" in report.to_markdown()


# Step 3: fixes.


@proves(
    4, "exploding: `clip_grad_norm_(..., max_norm=1.0)`, or `clip_grad_value_(..., clip_value=1.0)`"
)
@proves(4, "vanishing: print what is frozen, initialise with `xavier_uniform_`")
@proves(4, "NaN: `label_smoothing=0.1`, or a logarithm with `eps=1e-8`")
@pytest.mark.parametrize(
    ("norm", "code"),
    [
        (200.0, ["clip_grad_norm_(model.parameters(), max_norm=1.0)", "clip_value=1.0"]),
        (1e-4, ["requires_grad", "Frozen: ", "xavier_uniform_"]),
        (math.nan, ["label_smoothing=0.1", "1e-8"]),
    ],
)  # fmt: skip
def test_the_fixes(norm: float, code: Sequence[str]) -> None:
    (section,) = blocks_of(check_gradient_health(with_gradients(weight=[norm]), quiet=True))
    assert all(line in section for line in code), section
    compile(section, "fix", "exec")


def blocks_of(report: Any) -> list[str]:
    return re.findall(r"```python\n(.*?)```", report.to_markdown(), re.DOTALL)


# Step 4: the norm over time.


def trained(norms: Sequence[float], run_dir: Path | None = None) -> tuple[Any, list[Any]]:
    """A run whose gradient has these norms and whose loss stays; and what the loop saw itself."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen = []
    with gradsight.watch(model, optimizer, run_dir=run_dir) as watched:
        for norm in norms:
            moved = model(torch.full((1, 1), norm)).sum()
            loss = 2.3 + moved - moved.detach()
            optimizer.zero_grad()
            loss.backward()
            total_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=float("inf"))
            seen.append(total_norm.item())
            optimizer.step()
            watched.log(loss=float(loss.detach()))
    return watched.report(), seen


def wavering(count: int) -> list[float]:
    return [2.0 + 0.3 * math.sin(1.7 * number) + 1e-5 * number for number in range(count)]


@proves(4, "log gradient norms across training", "by `gradsight.watch`; the loop needs no list")
@proves(
    4,
    "plot them: Step, Gradient Norm, Gradient Norm Over Training",
    "`gradsight report` writes norms.svg: a logarithmic axis, findings at their step, no plotting package",
)
def test_the_norm_over_time(tmp_path: Path) -> None:  # fmt: skip
    _, seen = trained(wavering(40), tmp_path)
    recorded = [step.total_norm for step in gradsight.open_run(tmp_path).steps()]
    assert recorded == pytest.approx(seen, rel=1e-6)
    assert main(["report", str(tmp_path)]) == 0
    picture = (tmp_path / "norms.svg").read_text()
    for text in ("Gradient Norm Over Training", ">Step<", ">Gradient Norm<"):
        assert text in picture
    assert "(norms.svg)" in (tmp_path / "report.md").read_text()


@proves(4, "stable around 1 to 10: healthy, continue")
@proves(
    4,
    "increasing steadily: add clipping before it explodes",
    "as written: GS202, straight or faster; a warm-up that levels off is none",
)
@proves(
    4,
    "decreasing to near 0: check LR, architecture",
    "as written: GS203, unless the loss has come down too",
)
@proves(
    4,
    "spikes: clip, check data quality",
    "as written: GS201, and the samples of that step are named",
)
@pytest.mark.parametrize(
    ("norms", "code", "advice"),
    [
        (wavering(200), None, "None needed."),
        ([1 + 19 * n / 199 for n in range(200)], "GS202", "clip before it comes"),
        ([10.0 ** (-n / 20) for n in range(120)], "GS203", "learning rate"),
        ([*wavering(50), 80.0, *wavering(10)], "GS201", "corrupt sample"),
    ],
    ids=["stable", "rising", "decaying", "spike"],
)  # fmt: skip
def test_the_trends(norms: Sequence[float], code: str | None, advice: str) -> None:
    report, _ = trained(norms)
    assert codes(report) & {"GS201", "GS202", "GS203"} == {code} - {None}
    assert advice in report.to_markdown()


# What it catches, and the report.


@proves(4, "catches exploding gradients, vanishing gradients, dead neurons")
def test_dead_neurons() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.no_grad():
        model[0].bias[:28] = -100.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradsight.watch(model, optimizer) as watched:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    assert "GS205" in codes(watched.report())
    assert {"GS102", "GS105"} <= set(CHECKS)


@proves(
    4, "`## Gradient Health Report` with Summary, Issues Detected, Recommendations, Code to Add"
)
@proves(
    4,
    "the table Metric, Value, Status: total grad norm, NaN parameters, zero-grad parameters in percent",
    "as written, and Inf parameters, trends and wiring",
)
@proves(4, "issues with severity and affected layers; specific fixes")
def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    text = check_gradient_health(with_gradients(a=[500.0], b=[0.0]), 3).to_markdown()
    lines = text.splitlines()
    headings = [line for line in lines if line.startswith("#") and not line.startswith("# ")]
    assert headings == [
        "## Gradient Health Report",
        "### Summary",
        "### Issues Detected",
        "### Recommendations",
        "### Code to Add",
    ]
    assert "| Metric | Value | Status |" in lines
    assert "| Total grad norm | 500 | ⚠️ |" in lines
    assert "| NaN parameters | 0 | ✅ |" in lines
    assert "| Zero-grad parameters | 50% | ✅ |" in lines
    assert "1. ⚠️ **GS101 large gradient** (warning, since step 3)" in text
    assert "Affected layers: `a`" in text


@proves(
    4,
    "when to check: new architecture, new loss, mixed precision, Transformers, RNNs, very deep networks",
)
@proves(
    4,
    "and when the loss is NaN, stuck at a plateau, unstable",
    "`gradsight check --help` says both",
)
def test_when_to_check(capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    main(["check", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    before = "a new architecture, a new loss, a switch to mixed precision, Transformers, RNNs"
    assert before in said
    assert "very deep networks" in said
    assert "the loss is NaN, stuck on a plateau, or unstable" in said


# The command for coding assistants, and the example.


@proves(
    4,
    "front matter: description, allowed-tools, argument-hint",
    "`examples/check_gradients/check-gradients.md`: as written, and no tool that it does not need",
)
def test_the_front_matter() -> None:  # fmt: skip
    _, front, body = COMMAND.read_text().split("---\n", 2)
    facts = yaml.safe_load(front)
    assert set(facts) == {"description", "argument-hint", "allowed-tools"}
    assert facts["argument-hint"].startswith("[training_script.py]")
    assert all(isinstance(facts[name], str) for name in ("description", "argument-hint"))
    allowed = [tool[5:-3] for tool in facts["allowed-tools"] if tool.startswith("Bash(")]
    commands = [line for block in blocks(COMMAND, "sh") for line in block.splitlines()]
    # Each command is one that the assistant may run, and each that it may run is used.
    for command in commands:
        assert any(command.startswith(f"{start} ") for start in allowed), command
    for start in allowed:
        assert any(command.startswith(f"{start} ") for command in commands), start
    assert "$ARGUMENTS" in body


@proves(
    4,
    "the command checks the script that it is given",
    "by `gradsight check`: the script is run as it is, nothing is added to its loop",
)
@proves(
    4,
    "load a skill for detailed guidance",
    "none is needed: each finding carries its reason, its evidence and its fix",
)
@proves(4, "gradient issues cause 80% of failures", "not repeated: nobody has measured it")
@pytest.mark.slow
def test_every_command_of_the_command_file(tmp_path: Path) -> None:  # fmt: skip
    shutil.copy(EXAMPLE / "train.py", tmp_path)
    run, report = blocks(COMMAND, "sh")
    checked = shell(run, tmp_path, ARGUMENTS="train.py")
    assert checked.returncode == 1, checked.stderr
    result = json.loads(checked.stdout)
    text = COMMAND.read_text()
    finding = result["models"]["model"]["findings"][0]
    assert (result["status"], finding["code"], finding["severity"]) == (
        "warning",
        "GS202",
        "warning",
    )
    # Every field that the text tells the assistant to read is there.
    listed = re.search(r"^- each finding: (.*?)^- ", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) <= set(finding)
    assert {"step", "total_norm", "nan_count", "zero_count", "num_params", "abstained"} <= set(
        result["models"]["model"]
    )
    assert {"status", "models", "optimizers"} <= set(result)
    assert shell(report, tmp_path).returncode == 1
    assert "GS202" in (tmp_path / "gradient-check" / "norms.svg").read_text()
    assert "## Gradient Health Report" in (tmp_path / "gradient-check/report.md").read_text()
    assert "80%" not in text


def test_the_codes_of_the_command_file_mean_what_it_says() -> None:
    rows = re.findall(r"^\| .*\| (GS\d+) \| (\w+)", COMMAND.read_text(), re.MULTILINE)
    limits = {code: severity for code, severity in rows if severity in ("warning", "critical")}
    assert len(limits) == 6
    assert {code: CHECKS[code].severity for code in limits} == limits
    assert {code for code, _ in rows} - set(limits) == {"GS201", "GS202", "GS203"}


def figureless(text: str) -> str:
    """Text without its decimals, whose last digit is another on another processor."""
    return re.sub(r"\d+\.\d+", "_", text)


@pytest.mark.slow
def test_the_readme_shows_what_comes_out(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "train.py", tmp_path)
    page = EXAMPLE / "README.md"
    rising, report, mended = blocks(page, "sh")
    shown = blocks(page, "text")
    first = shell(rising, tmp_path)
    assert first.returncode == 1
    assert figureless(shown[0]) in figureless(first.stdout)
    assert shell(report, tmp_path).returncode == 1
    assert (tmp_path / "gradient-check" / "norms.svg").is_file()
    second = shell(mended, tmp_path)
    assert second.returncode == 0
    assert figureless(shown[1]) in figureless(second.stdout)
    (code,) = blocks(page, "python")
    looked = python("-c", code, folder=tmp_path)
    assert looked.stdout == shown[2], looked.stderr
