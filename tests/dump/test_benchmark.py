"""The benchmark runs and prints each figure beside its goal; the figures themselves are not judged
here.
"""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dump.py"


def test_it_prints_what_it_promises(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--megabytes", "40", "--rounds", "1", "--folder", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in (
        "x the copy (goal: at most 1.3x)",
        "x the wait (goal: at least 4x)",
        "x of raw (goal: at least 0.7x)",
    ):
        assert text in done.stdout
    assert not list(tmp_path.iterdir()), "nothing is left behind"
