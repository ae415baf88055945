"""A disk that fills up while a dump is written, in three ways; training goes on, and later dumps
succeed.
"""

import resource
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from gradsight import GradientDumper
from gradsight.core import files
from gradsight.dump.folders import find_dumps
from gradsight.dump.verify import verify
from gradsight.errors import GradsightWarning


def model(width: int) -> nn.Module:
    layer = nn.Linear(width, width)
    layer(torch.ones(1, width)).sum().backward()
    return layer


def check(run: Path, text: str) -> None:
    """A small dump, two that do not fit, a small one again: the fault is told once, counted, and
    leaves nothing.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with GradientDumper(run, asynchronous=True) as dumper:
            for step, width in enumerate((20, 600, 600, 20)):
                dumper.dump(model(width), step)
                dumper.wait()
        told = [str(one.message) for one in caught if one.category is GradsightWarning]
    assert len(told) == 1, told
    assert text in told[0]
    assert (dumper.written, dumper.failed) == (2, 2)
    assert [(one.key, one.first_step, one.count) for one in dumper.problems] == [("disk", 1, 2)]
    assert [folder.parent.name for folder in find_dumps(run)] == ["step0", "step3"]
    assert all(verify(folder).intact for folder in find_dumps(run))
    assert sorted(path.name for path in (run / "gradient_dumper").iterdir()) == ["step0", "step3"]


def limited(run: Path) -> None:
    """No file may grow beyond a limit."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    check(run, "gradient dump of step 1: File too large")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def small(run: Path) -> None:
    """A file system of one megabyte: seen beforehand, or when the write fails; and one that is
    read-only.
    """
    run.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(run)], check=True)
    try:
        check(run / "seen", "not enough space in")
        files.free_bytes = lambda path: 1 << 40
        check(run / "unseen", "gradient dump of step 1: No space left on device")
        subprocess.run(["mount", "-o", "remount,ro", str(run)], check=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with GradientDumper(run / "locked") as dumper:
                dumper.dump(model(20), 0)
        assert [
            str(one.message) for one in caught if "Read-only file system" in str(one.message)
        ], caught
        assert (dumper.written, dumper.failed) == (0, 1)
    finally:
        subprocess.run(["umount", "--lazy", str(run)], check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"limited": limited, "small": small}[sys.argv[2]](Path(sys.argv[1]) / sys.argv[2])
