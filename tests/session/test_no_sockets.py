"""No telemetry: nothing of ours opens a socket unless the user names a sink that does."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys, traceback
from pathlib import Path

def forbid(event, arguments):
    # Not an exception: our own guard would only tell of it.
    if event.startswith("socket."):
        traceback.print_stack()
        sys.stderr.flush()
        os._exit(9)

sys.addaudithook(forbid)
{first}
sys.path.insert(0, sys.argv[2])
import gradsight
from session.planted_faults import LOOPS, Subject
folder = Path(sys.argv[1])
for name, watched in LOOPS.items():
    subject = Subject.make(watched.optimizer)
    run_dir = folder / name
    with watched.dumper(run_dir) as dumper:
        watched.loop(subject, watched.open(subject, run_dir, dumper))
    if watched.kind == "Watch":
        print(name, len(list(gradsight.open_run(run_dir).steps())))
    else:
        assert list(run_dir.iterdir()), "scores are saved"
from gradsight.cli import main
print(main(["report", str(folder / "optimizer")]))
"""
TESTS = Path(__file__).parents[1]


def run(folder: Path, first: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.replace("{first}", first), str(folder), str(TESTS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_nothing_opens_a_socket(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "optimizer 12" in done.stdout
    page = TESTS.parent / "docs" / "reliability.md"
    assert "## No telemetry" in page.read_text()


def test_a_socket_would_be_noticed(tmp_path: Path) -> None:
    done = run(tmp_path, "import socket; socket.socket()")
    assert done.returncode == 9
