"""Dumping into a run that a stranger has sent: no link in it is followed, and no other run is hurt."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from gradsight import GradientDumper, load_keys
from gradsight.dump.folders import Layout, find_dumps
from gradsight.dump.reader import dumps_in
from gradsight.dump.verify import verify
from gradsight.errors import RunError


@pytest.fixture
def other(tmp_path: Path, model: nn.Module) -> Path:
    """Another run's dumps, which are precious."""
    with GradientDumper(tmp_path / "other") as dumper:
        for step in range(3):
            dumper.dump(model, step)
    return tmp_path / "other" / "gradient_dumper"


def dump(run: Path, model: nn.Module, steps: range, **options: int) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with GradientDumper(run, **options) as dumper:
            for step in steps:
                dumper.dump(model, step)
    return [str(each.message) for each in told]


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "all dumps": lambda dumps, other: dumps.symlink_to(other),
    "a step": lambda dumps, other: (dumps.mkdir(), (dumps / "step0").symlink_to(other / "step0"))[
        0
    ],
    "a dump": lambda dumps, other: (
        (dumps / "step0").mkdir(parents=True),
        (dumps / "step0/full_gradients").symlink_to(other / "step0/full_gradients"),
    )[0],
    "unfinished": lambda dumps, other: (
        dumps.mkdir(),
        (dumps / "step1.partial").symlink_to(other / "step1"),
    )[0],
    "unfinished dump": lambda dumps, other: (
        (dumps / "step1.partial").mkdir(parents=True),
        (dumps / "step1.partial/full_gradients").symlink_to(other / "step1/full_gradients"),
    )[0],
    "replaced": lambda dumps, other: (
        (dumps / "step1.partial").mkdir(parents=True),
        (dumps / "step1.partial/full_gradients.old").symlink_to(other / "step1/full_gradients"),
    )[0],
}


@pytest.mark.parametrize("name", PLANTED)
def test_other_runs_keep_their_dumps(
    name: str, tmp_path: Path, other: Path, model: nn.Module
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    PLANTED[name](run / "gradient_dumper", other)
    before = shutil.copytree(other, tmp_path / "before")
    told = dump(run, model, range(4), keep_last=1)
    assert all("behind a link" in text for text in told), told
    for layout in (Layout(run, kind) for kind in ("full", "sampled")):
        layout.complete()
    assert len(dumps_in(run)) <= 1
    folders = sorted(path.relative_to(other) for path in other.rglob("*"))
    assert folders == sorted(path.relative_to(before) for path in before.rglob("*"))
    assert all(verify(folder).intact for folder in find_dumps(other.parent))


def test_links_are_not_read(tmp_path: Path, other: Path, model: nn.Module) -> None:
    run = tmp_path / "run"
    dump(run, model, range(1))
    (run / "gradient_dumper/step1").symlink_to(other / "step1")
    assert [metadata.step for metadata in dumps_in(run)] == [0]
    (run / "gradient_dumper/step2").mkdir()
    (run / "gradient_dumper/step2/full_gradients").symlink_to(other / "step2/full_gradients")
    with pytest.raises(RunError, match="behind a link"):
        find_dumps(run)
    with pytest.raises(RunError, match="behind a link"):
        next(load_keys(run / "gradient_dumper/step2", ["0.bias"]))
    # Whoever names the link itself means it.
    assert next(load_keys(run / "gradient_dumper/step1", ["0.bias"])).shape == (7,)
