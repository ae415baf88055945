"""The benchmark runs and prints each figure beside its goal; the figures themselves are not judged
here.
"""

from pathlib import Path

import warm

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dump.py"


def test_it_prints_what_it_promises(tmp_path: Path) -> None:
    options = ["--megabytes", "4", "--rounds", "1", "--folder", tmp_path]
    done = warm.run([SCRIPT, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in (
        "x the copy (goal: at most 1.3x)",
        "x the wait (goal: at least 4x)",
        "x of raw (goal: at least 0.7x)",
    ):
        assert text in done.stdout
    assert not list(tmp_path.iterdir()), "nothing is left behind"
