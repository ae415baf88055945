"""scripts/stage.sh: one line per stage of the set-up; the rest is shown only when it fails."""

import re
import subprocess
from pathlib import Path

STAGE = Path(__file__).parents[2] / "scripts" / "stage.sh"


def stage(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STAGE, "installing", "bash", "-c", command], capture_output=True, text=True
    )


def test_a_stage_that_works_is_one_line_with_its_time() -> None:
    done = stage("echo a page of warnings; echo and more >&2")
    assert re.fullmatch(r"installing \.\.\. \d+ s\n", done.stdout)
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_stage_that_fails_shows_everything_and_keeps_its_code() -> None:
    done = stage("echo no such package >&2; exit 7")
    assert done.stdout == "installing ... failed:\nno such package\n"
    assert done.returncode == 7
