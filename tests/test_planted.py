"""What a stranger can put in the place of a file: links, devices, claims, nests, and no types.

All reading commands look at each, in one process that may take 2 GiB more than it has.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from dump.test_manifest import rewrite
from gradsight.core.documents import document_text
from gradsight.store.incident_format import describe_file, encode_document
from hostile import hostile_run
from test_strangers import commands

DEEP = b"[" * 50_000 + b"]" * 50_000
FULL = "gradient_dumper/step3/full_gradients"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    run = hostile_run(folder / "run", "name")
    other = folder / "other"
    shutil.copytree(run, other)
    (other / "secret").write_text("the reader's own words")
    return folder


def in_place(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something else in the place of a file or folder."""

    def plant(run: Path) -> None:
        place = run / name
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        make(place)

    return plant


def link_to(name: str) -> Callable[[Path], object]:
    """A link to the same file of another run, or to a device."""

    def link(place: Path) -> None:
        run = next(folder for folder in place.parents if folder.name == "run")
        target = Path(name) if name else run.parent / "other" / place.relative_to(run)
        place.symlink_to(target)

    return link


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Another manifest, signed."""
    return lambda run: rewrite(run / FULL, change)


def entry(body: dict[str, Any]) -> dict[str, Any]:
    return next(iter(body["tensors"].values()))


def many_chunks(body: dict[str, Any]) -> None:
    """Forty thousand pieces of one tensor that all lie in the same rows."""
    chunk = {**entry(body)["chunks"][0], "sizes": [1, 1], "bytes": 4}
    pieces = [{**chunk, "offsets": [0, column], "offset": 4 * column} for column in range(40_000)]
    body["files"][chunk["file"]]["bytes"] = 10**9
    body["tensors"] = {"w": {**entry(body), "shape": [1, 40_000], "chunks": pieces}}
    entry(body)["chunks"][-1]["offsets"] = [0, 0]


def claims(body: dict[str, Any]) -> None:
    """A tensor of three gigabytes, for which there is a file of zeros that takes no room."""
    chunk = {**entry(body)["chunks"][0], "file": "large", "offset": 0}
    chunk |= {"bytes": 3 << 30, "sizes": [3 << 28], "offsets": [0]}
    body["files"]["large"] = {"bytes": 3 << 30, "frame_crc32": 0}
    body["tensors"] = {"w": {**entry(body), "shape": [3 << 28], "chunks": [chunk]}}


def large_file(run: Path) -> None:
    changed(claims)(run)
    os.truncate(os.open(run / FULL / "large", os.O_CREAT | os.O_WRONLY), 3 << 30)


def incident(**parts: Any) -> Callable[[Path], object]:
    """Another incident, signed."""

    def plant(run: Path) -> None:
        folder = next((run / "incidents").iterdir())
        (folder / "incident.json").write_text(encode_document(parts))

    return plant


def large_model(**shape: int) -> Callable[[Path], object]:
    """An incident that could be run again, of a run whose settings name an absurd model."""

    def plant(run: Path) -> None:
        import numpy as np

        folder = next((run / "incidents").iterdir())
        save_file({"pass0.args.0": np.zeros((2, 3), np.int64)}, folder / "batch.safetensors")
        files = {"batch.safetensors": describe_file(folder, "batch.safetensors")}
        passes = [{"args": ["tuple", [["tensor", "pass0.args.0"]]]}]
        incident(passes=passes, files=files, step=2)(run)
        block_size = shape.pop("block_size", 8)
        train = {"architecture": "char", "block_size": block_size, "model": shape}
        (run / "config.json").write_text(document_text({"settings": {"train": train}}))

    return plant


PLANTS: dict[str, Callable[[Path], object]] = {
    "manifest fifo": in_place(f"{FULL}/manifest.json", os.mkfifo),
    "manifest zero": in_place(f"{FULL}/manifest.json", link_to("/dev/zero")),
    "manifest link": in_place(f"{FULL}/manifest.json", link_to("")),
    "manifest folder": in_place(f"{FULL}/manifest.json", os.mkdir),
    "manifest deep": in_place(f"{FULL}/manifest.json", lambda place: place.write_bytes(DEEP)),
    "manifest chunks": changed(many_chunks),
    "manifest shape": changed(lambda body: entry(body).update(shape=[10**12, 10**12])),
    "manifest types": changed(lambda body: body.update(created="now", left_out=[1], files=3)),
    "manifest claims": changed(claims),
    "manifest large": large_file,
    "data fifo": in_place(f"{FULL}/__0_0.distcp", os.mkfifo),
    "data zero": in_place(f"{FULL}/__0_0.distcp", link_to("/dev/zero")),
    "data link": in_place(f"{FULL}/__0_0.distcp", link_to("")),
    "dump link": in_place(FULL, link_to("")),
    "step link": in_place("gradient_dumper/step3", link_to("")),
    "dumps link": in_place("gradient_dumper", link_to("")),
    "incident types": incident(step="x", files=[], passes=3, diagnosis=[], scale="y"),
    "incident diagnosis": incident(step=1, diagnosis={"samples": [3], "notes": None}),
    "incidents link": in_place("incidents", link_to("")),
    "check deep": in_place("check.json", lambda place: place.write_bytes(DEEP)),
    "check types": in_place("check.json", lambda place: place.write_text('{"script": [1]}')),
    "check fifo": in_place("check.json", os.mkfifo),
    "script types": in_place("script.json", lambda place: place.write_text('[{"made": 3}, 4]')),
    "script zero": in_place("script.json", link_to("/dev/zero")),
    "layers": large_model(n_layer=10**9),
    "width": large_model(n_embd=10**7, n_head=1),
    "length": large_model(block_size=10**6),
    "vocabulary": large_model(vocab_size=10**9),
}

READ = """
import json, resource, sys
from pathlib import Path
from gradsight.cli import main
import gradsight.cli.report, gradsight.cli.dump, gradsight.cli.influence, gradsight.cli.replay
import pyarrow.parquet
pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for name, lines in json.load(sys.stdin).items():
    for line in lines:
        print(f"== {name} {line[:2]}", flush=True)
        print(f"== {name} {line[:2]}", file=sys.stderr, flush=True)
        print(f"-> {main(line)}", flush=True)
"""


FEW = ("manifest fifo", "manifest deep", "data link", "dumps link", "incident types", "layers")


@pytest.mark.parametrize(
    "names",
    [pytest.param(FEW, id="few"), pytest.param(tuple(PLANTS), marks=pytest.mark.slow, id="all")],
)
def test_all_of_it_is_refused_in_words(names: tuple[str, ...], base: Path, tmp_path: Path) -> None:
    todo = {}
    for name in names:
        plant = PLANTS[name]
        run = tmp_path / name.replace(" ", "-") / "run"
        shutil.copytree(base / "run", run)
        (run.parent / "other").symlink_to(base / "other")
        plant(run)
        lines = [line for line in commands(run) if line[0] in ("report", "dump", "replay")]
        lines = [line for line in lines if "--json" not in line]
        if name == "manifest large":  # reading all of it is what one sequential read takes
            lines = [line for line in lines if line[:2] == ["dump", "show"]]
        todo[name] = lines
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps(todo),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "Traceback" not in said
    assert "unexpectedly" not in said, said[said.index("unexpectedly") - 600 :][:1200]
    assert "own words" not in said
    codes = {line for line in done.stdout.splitlines() if line.startswith("-> ")}
    assert codes <= {"-> 0", "-> 1", "-> 2", "-> 64"}
    for name, words in [(name, REFUSED[name]) for name in names if name in REFUSED]:
        parts = [part for part in done.stderr.split("== ") if part.startswith(f"{name} ")]
        assert words in "".join(parts) + done.stdout, (name, parts)
    assert (base / "other" / "secret").read_text() == "the reader's own words"


REFUSED = {
    "dumps link": "is behind a link",
    "layers": "names 1000000000 layers",
    "width": "10000000 wide",
    "length": "more than a run's own settings",
    "vocabulary": "more than a run's own settings",
    "incident types": "'step' of",
    "check types": "is malformed",
}
