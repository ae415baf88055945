"""The commands that `gradsight check` tells you to type next."""

import sys
from pathlib import Path

import pytest

from gradsight.cli.command_lines import CheckCommand

PLAIN = [sys.executable, "train.py", "--name", "two words"]


def command(**changes: object) -> CheckCommand:
    given = {"script": PLAIN[1:], "plain": PLAIN, "options": ["--steps", "5"]}
    return CheckCommand(**{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setattr(sys, "argv", ["gradsight", "check"])


def test_each_command_stands_on_a_line_of_its_own() -> None:
    assert command().after_failure() == [
        "To see whether Gradsight causes this failure, run the script without the pre-flight:",
        "   gradsight check --steps 5 --no-preflight train.py --name 'two words'",
        "or without Gradsight:",
        "   python train.py --name 'two words'",
    ]


def test_a_run_without_preflight_is_not_suggested_again() -> None:
    assert command(has_preflight=False).after_failure() == [
        "To see whether Gradsight causes this failure, run the script without Gradsight:",
        "   python train.py --name 'two words'",
    ]


def test_health_settings_stay() -> None:
    lines = command(health=Path("my health.toml")).after_failure()
    assert "--no-preflight --health 'my health.toml' train.py" in lines[1]


def test_a_finding_is_silenced_in_a_file() -> None:
    assert command(options=()).to_silence(["GS401"]) == [
        "To silence GS401, put GS401 = false at the top of health.toml and run:",
        "   gradsight check --health health.toml train.py --name 'two words'",
    ]
    lines = command(health=Path("a.toml"), has_preflight=False).to_silence(["GS401", "GS205"])
    assert lines == [
        "To silence GS401 (and likewise the others), put GS401 = false at the top of a.toml and "
        "run:",
        "   gradsight check --steps 5 --no-preflight --health a.toml train.py --name 'two words'",
    ]


def test_a_program_that_the_shell_does_not_find_keeps_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/env/bin/gradsight", "check"])
    _, check, _, plain = command(options=()).after_failure()
    assert check.split()[:2] == ["/env/bin/gradsight", "check"]
    assert plain.split()[:2] == [sys.executable, "train.py"]


def test_gradsight_is_called_as_you_called_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/env/gradsight/__main__.py", "check"])
    assert command().after_failure()[1].startswith("   python -m gradsight check --steps 5")


def test_a_device_is_not_given_as_the_file_to_change() -> None:
    lines = command(options=(), health=Path("/dev/null")).to_silence(["GS401"])
    assert lines[0].endswith("at the top of health.toml and run:")
    assert "--health health.toml" in lines[1]
