"""gradsight dump: what it prints at 80 columns, its exit codes, and that it needs no torch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradsight import GradientDumper
from gradsight.cli import main
from gradsight.dump.job import Facts


@pytest.fixture
def run(tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps, both kinds at the first."""
    monkeypatch.setenv("COLUMNS", "80")
    return dump_twice(tmp_path / "run", model)


def dump_twice(path: Path, model: nn.Module) -> Path:
    with GradientDumper(path) as full, GradientDumper(path, save_first_n=2) as sampled:
        full.dump(model, 0)
        sampled.dump(model, 0)
        full.dump(model, 10)
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    code = main(["dump", *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "/" not in line), (
        "fits the terminal, but for paths"
    )
    return code, [line.rstrip() for line in lines]


def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "gradient_dumper/step11.partial/full_gradients").mkdir(parents=True)
    code, lines = call(capsys, "list", run)
    assert code == 0
    assert lines[0].split() == ["step", "kind", "gradients", "size", "ranks", "written", "why"]
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["0", "full", "4"],
        ["0", "sampled", "4"],
        ["10", "full", "4"],
    ]
    assert lines[1].endswith("schedule")
    assert lines[4] == "gradient: as found in .grad"
    assert lines[5] == "unfinished, never read: step11.partial"


def test_list_has_one_line_for_each_dump(
    tmp_path: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    used = "as the optimizer used it, after any clipping"
    with GradientDumper(tmp_path) as dumper:
        dumper.capture(model, 0, Facts(gradient="true"))
        spike = "GS201 gradient spike; GS101 large gradient, found at step 1069"
        dumper.capture(model, 1070, Facts(gradient="true", reason=spike))
        dumper.capture(model, 1200, Facts(gradient=used, reason="GS202 rising"))
    code, lines = call(capsys, "list", tmp_path)
    assert code == 0
    assert [line.split()[-1] for line in lines[1:4]] == ["schedule", "GS101", "GS202"]
    assert lines[4:] == [
        f"step 1070: {spike}",
        "step 1200: GS202 rising",
        "gradient (step 0, 1070): true",
        f"gradient (step 1200): {used}",
    ]


def test_list_names_what_cannot_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "gradient_dumper/step10/full_gradients/manifest.json").write_text("{}")
    code, lines = call(capsys, "list", run)
    assert code == 2
    assert lines[-1].startswith("unreadable: ")
    assert lines[-1].endswith("manifest.json is not the manifest of a gradient dump")


def test_show(run: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = call(capsys, "show", run)
    assert code == 0
    assert lines[0] == "step 10, full, gradient: as found in .grad"
    assert [line.split()[0] for line in lines[2:]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert lines[2].split()[1:3] == ["7x5", f"{model[0].weight.grad.norm():.2e}"]
    assert "█" in lines[2]


def test_show_one_parameter(
    run: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = call(capsys, "show", run, "--step", 0, "--parameter", "1.*")
    assert code == 0
    assert lines[0] == "step 0, full, gradient: as found in .grad"
    assert lines[2] == "1.weight  [300, 7] float32"
    assert lines[3].startswith(f"  norm {model[1].weight.grad.double().norm():.6g}  mean ")
    assert lines[3].endswith("zeros 0  NaN 0  Inf 0  of 2,100")
    median = model[1].weight.grad.double().quantile(0.5)
    assert f"50% {median:.3g}" in lines[4]
    assert lines[7] == "1.bias  [300] float32"


def test_show_what_is_not_finite(
    tmp_path: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    model[0].bias.grad[2:4] = float("nan")
    model[1].bias.grad[0] = float("inf")
    with GradientDumper(tmp_path) as dumper:
        dumper.dump(model, 0)
    _, lines = call(capsys, "show", tmp_path)
    assert lines[3].endswith("2 NaN")
    assert lines[5].endswith("1 Inf")


def test_show_a_sampled_dump(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = call(capsys, "show", run / "gradient_dumper/step0/sampled_gradients")
    assert lines[0].startswith("step 0, sampled")
    assert lines[2].split()[:2] == ["0.weight", "2x5"]


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = call(capsys, "verify", run)
    assert code == 0
    assert lines[0].startswith("ok       step 0 full_gradients: 4 gradients, ")
    assert lines[-1] == "3 of 3 dumps are intact"
    path = run / "gradient_dumper/step10/full_gradients/__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])
    code, lines = call(capsys, "verify", run)
    assert code == 2
    assert lines[2] == "damaged  step 10 full_gradients"
    assert lines[3].startswith("         __0_0.distcp: ")
    assert lines[-1] == "2 of 3 dumps are intact"
    assert call(capsys, "verify", run, "--step", 0)[0] == 0


def test_diff(
    run: Path, tmp_path: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    with GradientDumper(other) as dumper:
        dumper.dump(model, 0)
        model[1].bias.grad[3] *= 1 + 1e-4
        dumper.dump(model, 10)
    code, lines = call(capsys, "diff", run, other, "--step", 0)
    assert (code, lines[-1]) == (0, "4 gradients are the same within 0")
    code, lines = call(capsys, "diff", run, other)
    assert (code, lines[-1]) == (1, "1 of 8 gradients differ by more than 0")
    assert lines[1].split()[:2] == ["10", "1.bias"]
    code, lines = call(capsys, "diff", run, other, "--tolerance", "1e-3", "--limit", 1)
    assert (code, lines[-1]) == (0, "8 gradients are the same within 0.001")
    assert lines[-2] == "and 7 more; --limit shows them"


FULL = "gradient_dumper/step10/full_gradients"
READS = {"list": 0, "show": 2, "verify": 2, "diff": 2}
"""The commands that read gradients exit with 2; the list reads manifests only."""


def flip_a_byte(run: Path) -> None:
    data = bytearray((run / FULL / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (run / FULL / "__0_0.distcp").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda run: None, dict.fromkeys(READS, 0)),
        (flip_a_byte, READS),
        (lambda run: os.truncate(run / FULL / "__0_0.distcp", 100), READS),
        (lambda run: (run / FULL / "__0_0.distcp").unlink(), READS),
        (lambda run: (run / FULL / "manifest.json").write_text("{"), dict.fromkeys(READS, 2)),
        (lambda run: shutil.rmtree(run / "gradient_dumper"), dict.fromkeys(READS, 64)),
        (lambda run: shutil.rmtree(run), dict.fromkeys(READS, 64)),
    ],
    ids=["intact", "flipped", "cut short", "no data", "bad manifest", "no dumps", "no folder"],
)
def test_exit_codes_tell_damage_from_a_missing_dump(
    damage: Callable[[Path], object], expected: dict[str, int], run: Path
) -> None:
    damage(run)
    commands = {"list": [run], "show": [run], "verify": [run], "diff": [run, run]}
    codes = {name: main(["dump", name, *map(str, runs)]) for name, runs in commands.items()}
    assert codes == expected


def test_wrong_usage(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in [
        (["show", run, "--step", 7], "has no dump of step 7; it has steps 0, 10"),
        (
            ["show", run, "--parameter", "nothing*"],
            "no gradient matches 'nothing*'; there are 0.weight, 0.bias, 1.weight, 1.bias",
        ),
        (["diff", run, run, "--tolerance", "-1"], "--tolerance must be 0 or more, got -1"),
        (["diff", run, run, "--limit", "-3"], "--limit must be 0 or more, got -3"),
        (["show", run, "--parameter", ""], "--parameter must be a name or a pattern"),
    ]:
        assert main(["dump", *map(str, arguments)]) == 64
        assert text in capsys.readouterr().err
    assert main(["dump", "verify", str(tmp_path / "run" / "gradient_dumper" / "step0" / "x")]) == 64
    assert "does not exist" in capsys.readouterr().err
    assert main(["dump", "verify", str(tmp_path / "none" / "full_gradients")]) == 64
    assert "does not exist" in capsys.readouterr().err
    assert main(["dump", "list", str(tmp_path)]) == 64
    assert (
        "holds no gradient dump; expected gradient_dumper/step{N}/full_gradients or"
        in capsys.readouterr().err
    )


def test_odd_names_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in a name are no markup."""
    module = nn.Module()
    module._parameters["[red]x[/]"] = nn.Parameter(torch.ones(2))
    module._parameters["[red]x[/]"].grad = torch.ones(2)
    with GradientDumper(tmp_path) as dumper:
        dumper.dump(module, 0)
    for arguments in (
        ["show", tmp_path],
        ["show", tmp_path, "--parameter", "x"],
        ["diff", tmp_path, tmp_path],
    ):
        _, lines = call(capsys, *arguments)
        assert any("[red]x[/]" in line for line in lines), arguments


COMMANDS = ["list", "show", "verify", "diff"]


@pytest.fixture(scope="module")
def in_a_new_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command prints in an interpreter of its own, with the modules that it imported."""
    model = nn.Linear(2, 3)
    model(torch.ones(1, 2)).sum().backward()
    folder = dump_twice(tmp_path_factory.mktemp("run"), model)
    code = f"""
import contextlib, io, json, sys
from gradsight.cli import main
answers = {{}}
for command in {COMMANDS}:
    runs = [{str(folder)!r}] * (2 if command == "diff" else 1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["dump", command, *runs])
    answers[command] = code, printed.getvalue(), "torch" in sys.modules
print(json.dumps(answers))
"""
    environment = {
        "NO_COLOR": "1",
        "FORCE_COLOR": "1",
        "PATH": "",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("command", COMMANDS)
def test_no_torch_and_no_colour(command: str, in_a_new_process: dict[str, Any]) -> None:
    code, printed, has_torch = in_a_new_process[command]
    assert code == 0
    assert printed
    assert not has_torch, "torch was imported"
    assert "\x1b[3" not in printed, "a colour"
