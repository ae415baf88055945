"""Nothing of ours is left to a thread of gloo when the interpreter ends, in any order of ending."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def ended(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patience", "training"),
    [
        ("waited for", "destroy"),
        ("given up", "keep"),
        ("waited for", "keep"),
        ("given up", "destroy"),
    ],
)
def test_an_exchange_under_way_at_the_end(tmp_path: Path, patience: str, training: str) -> None:
    done = ended("lock_held_at_the_end.py", patience, training, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "rank 0 waited").exists()


def test_a_watch_that_nobody_closes_leaves_nothing_at_the_end(tmp_path: Path) -> None:
    """One case of the table below: FSDP, and training's group is destroyed before."""
    check_endings(tmp_path, "watch fsdp", "destroy", lines=2)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute of processor time
def test_every_order_of_ending(tmp_path: Path) -> None:
    """A look, dumps and a watch; closed or not; training's group destroyed before, after, never."""
    check_endings(tmp_path, lines=4 * 5 * 2)


def check_endings(folder: Path, *case: str, lines: int) -> None:
    """Let both ranks of one case, or of all cases, end; nothing may be left of any."""
    done = ended("every_ending.py", folder, *case)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    assert len(printed) == lines, done.stdout
    wrong = [line for line in printed if not line.endswith("nothing left")]
    assert not wrong, "\n".join(wrong)
