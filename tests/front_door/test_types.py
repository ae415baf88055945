"""What type checkers and editors see of the front door: real types, and no Any."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradsight

SCRIPT = Path(__file__).with_name("script.py")
CHECKERS = {
    "mypy": ["mypy", "--strict", "--no-error-summary", f"--cache-dir={os.devnull}"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}
REVEALED = re.compile(r'Revealed type is "(.*)"$|Type of ".*" is "(.*)"$', re.MULTILINE)


def read_by(checker: str, script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *CHECKERS[checker], str(script)]
    return subprocess.run(command, capture_output=True, text=True, cwd=script.parent)


def revealed(output: str) -> list[str]:
    return [first or second for first, second in REVEALED.findall(output)]


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_script_has_no_error_and_no_any(checker: str) -> None:
    done = read_by(checker, SCRIPT)
    assert done.returncode == 0, done.stdout
    types = revealed(done.stdout)
    assert len(types) == SCRIPT.read_text().count("reveal_type(")
    assert [each for each in types if re.search(r"\b(Any|Unknown)\b", each)] == []


def test_the_script_uses_every_public_name() -> None:
    script = SCRIPT.read_text()
    assert [name for name in gradsight.__all__ if f"gradsight.{name}" not in script] == []


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_checkers_can_fail(checker: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import gradsight\n\ngradsight.wacth()\ngradsight.Schedule('every step')\n")
    done = read_by(checker, wrong)
    assert done.returncode == 1
    assert "wacth" in done.stdout
    assert "Schedule" in done.stdout or "every step" in done.stdout
