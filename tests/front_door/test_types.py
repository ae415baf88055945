"""What type checkers and editors see of the front door: real types, and no Any.

In the slow tier: each checker reads all of torch's types first, which takes most of a minute.
"""

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


WRONG = "import gradsight\n\ngradsight.wacth()\ngradsight.Schedule('every step')\n"


@pytest.fixture(scope="module", params=CHECKERS)
def lines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What a checker says, by file: one run for the right script and for a wrong one."""
    wrong = tmp_path_factory.mktemp("types") / "wrong.py"
    wrong.write_text(WRONG)
    command = [sys.executable, "-m", *CHECKERS[request.param], str(SCRIPT), str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=wrong.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout.splitlines()
    return {
        name: [line for line in said if re.search(rf"\b{name}:\d+:", line)]
        for name in ("script.py", "wrong.py")
    }


def revealed(output: str) -> list[str]:
    return [first or second for first, second in REVEALED.findall(output)]


@pytest.mark.slow
def test_a_users_script_has_no_error_and_no_any(lines: dict[str, list[str]]) -> None:
    assert [line for line in lines["script.py"] if " error: " in line] == []
    types = revealed("\n".join(lines["script.py"]))
    assert len(types) == SCRIPT.read_text().count("reveal_type(")
    assert [each for each in types if re.search(r"\b(Any|Unknown)\b", each)] == []


def test_the_script_uses_every_public_name() -> None:
    script = SCRIPT.read_text()
    assert [name for name in gradsight.__all__ if f"gradsight.{name}" not in script] == []


@pytest.mark.slow
def test_the_checkers_can_fail(lines: dict[str, list[str]]) -> None:
    misspelled, mistyped = [line for line in lines["wrong.py"] if " error: " in line]
    assert "wacth" in misspelled
    assert "Schedule" in mistyped or "every step" in mistyped
