"""The dumps of a run, found and verified without the package's own modules."""

import contextlib
import io
from pathlib import Path

from gradsight.cli import main


def find_dumps(run: Path) -> list[Path]:
    """Return the folders of finished dumps in the order of steps."""
    folders = (run / "gradient_dumper").glob("step*/*_gradients")
    by_step = {
        (int(folder.parent.name[4:]), folder.name): folder
        for folder in folders
        if folder.parent.name[4:].isdigit()
    }
    return [by_step[place] for place in sorted(by_step)]


def is_intact(folder: Path) -> bool:
    """Return whether `gradsight dump verify` finds no damage."""
    with contextlib.redirect_stdout(io.StringIO()):
        return main(["dump", "verify", str(folder)]) == 0
