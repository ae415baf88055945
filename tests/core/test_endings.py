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
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.parametrize("training", ["keep", "destroy"])
@pytest.mark.parametrize("patience", ["waited for", "given up"])
def test_an_exchange_under_way_at_the_end(tmp_path: Path, patience: str, training: str) -> None:
    done = ended("lock_held_at_the_end.py", patience, training, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "rank 0 waited").exists()


def test_every_order_of_ending(tmp_path: Path) -> None:
    """A look, dumps and a watch; closed or not; training's group destroyed before, after, never."""
    done = ended("every_ending.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 * 5 * 2, done.stdout
    wrong = [line for line in lines if not line.endswith("nothing left")]
    assert not wrong, "\n".join(wrong)
