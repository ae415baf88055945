"""Files and folders are there whole or not at all, and durable before they get their name."""

import contextlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm
from gradsight.core import files
from gradsight.core.files import whole_file, whole_folder, write_text
from gradsight.errors import GradsightError

CALLS = ("open", "fsync", "rename", "replace", "rmdir", "unlink", "close")


def watch_calls(monkeypatch: pytest.MonkeyPatch, before: Callable[[str, Any], None]) -> None:
    """Have `before` see every thing asked of the system."""

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            before(name, arguments[0])
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)
        # Whoever asks whether the system can do this asks for the function itself.
        monkeypatch.setattr(os, "supports_dir_fd", {*os.supports_dir_fd, call})

    for name in CALLS:
        wrap(name)


def named(handle: int) -> str:
    """The name of an open file, without what is random in it."""
    name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
    return re.sub(r"\.[0-9a-f]{8}\.partial", ".partial", name)


def write_folder(path: Path, text: str) -> None:
    with whole_folder(path) as partial:
        (partial / "one").write_text(text)
        (partial / "two").write_text(text)


def test_the_disk_has_a_file_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def note(name: str, what: Any) -> None:
        if name == "fsync":
            order.append(f"fsync {named(what)}")
        elif name == "replace":
            order.append("replace")

    watch_calls(monkeypatch, note)
    write_text(tmp_path / "report.md", "fine")
    assert order == ["fsync .report.md.partial", "replace", f"fsync {tmp_path.name}"]
    assert (tmp_path / "report.md").read_text() == "fine"


def test_the_disk_has_a_folder_and_its_files_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def note(name: str, what: Any) -> None:
        if name == "fsync":
            order.append(f"fsync {named(what)}")
        elif name == "rename":
            order.append("rename")

    watch_calls(monkeypatch, note)
    write_folder(tmp_path / "step_1", "new")
    assert sorted(order[:2]) == ["fsync one", "fsync two"]
    assert order[2:] == ["fsync .step_1.partial", "rename", f"fsync {tmp_path.name}"]


@pytest.mark.parametrize("writer", [write_text, write_folder])
def test_a_fault_at_any_point_leaves_all_or_nothing(
    writer: Callable[[Path, str], None], tmp_path: Path
) -> None:
    """The disk refuses one call after the other, until the writer gets through."""
    path = tmp_path / "target"
    for point in range(100):
        left = point

        def refuse(name: str, what: Any) -> None:
            nonlocal left
            left -= 1
            if left == -1 and name != "close":
                raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, refuse)
            with contextlib.suppress(OSError):
                writer(path, "whole")
        there = [path] if path.is_file() else list(path.glob("*"))
        assert {file.read_text() for file in there} <= {"whole"}
        assert len(there) in (0, 1 if writer is write_text else 2)
        if left >= 0:
            break
    assert point > 3, "no call was refused"
    assert [file.name for file in tmp_path.iterdir()] == ["target"]


def test_an_older_file_stays_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "scores.parquet"
    path.write_text("older")
    with pytest.raises(ValueError, match="broken"), whole_file(path) as partial:
        partial.write_text("half")
        raise ValueError("broken")
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder of the reader's own, with a file that nobody else may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("secret")
    return folder


def test_links_that_wait_for_a_writer_lead_nowhere(tmp_path: Path, secret: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("report.md", "report.md.partial", ".report.md.0123abcd.partial"):
        (run / name).symlink_to(secret / "file")
    write_text(run / "report.md", "ours")
    assert (secret / "file").read_text() == "secret"
    assert not (run / "report.md").is_symlink()
    assert (run / "report.md").read_text() == "ours"


def test_no_folder_behind_a_link_is_written_to_or_cleared(tmp_path: Path, secret: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "inner").symlink_to(secret)
    attempts: list[Callable[[], None]] = [
        lambda: write_text(run / "inner/file", "ours", below=run),
        lambda: files.remove_tree(run / "inner/file", below=run),
        lambda: files.move(run / "inner/file", run / "file", below=run),
        lambda: files.make_folder(run / "inner/more", below=run),
        lambda: write_folder_below(run / "inner/step_1", run),
    ]
    for attempt in attempts:
        with pytest.raises(GradsightError, match="not followed"):
            attempt()
    files.remove_if_empty(run / "inner", below=run)
    files.remove_tree(run / "inner", below=run)
    assert [file.name for file in secret.iterdir()] == ["file"]
    assert (secret / "file").read_text() == "secret"
    assert list(run.iterdir()) == []


def write_folder_below(path: Path, below: Path) -> None:
    with whole_folder(path, below=below) as partial:
        (partial / "one").write_text("ours")


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    write_text(tmp_path / "run/report.md", "fine")
    write_folder_below(tmp_path / "run/checkpoints/step_1", tmp_path / "run")
    assert (tmp_path / "real/report.md").read_text() == "fine"
    assert (tmp_path / "real/checkpoints/step_1/one").read_text() == "ours"


KILLED = """
import os, sys
from pathlib import Path
from gradsight.core.files import whole_file, whole_folder
with whole_file(Path(sys.argv[1])) as file, whole_folder(Path(sys.argv[2])) as folder:
    file.write_text("half")
    os._exit(9)
"""


def test_what_a_killed_writer_left_goes_with_the_next(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    folder = tmp_path / "step_1"
    assert warm.run(["-c", KILLED, file, folder]).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    # Written before temporary names were random.
    (tmp_path / "report.md.partial").write_text("old")
    with whole_file(file) as mine:
        # Another writer of the same file at the same time is left alone.
        write_text(file, "fine")
        mine.write_text("later")
    assert file.read_text() == "later"
    write_folder(folder, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "step_1"]


def test_an_older_folder_is_replaced_and_never_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step_1"
    write_folder(path, "old")
    write_folder(path, "new")
    # As on systems that cannot let two names change places.
    monkeypatch.setattr(files, "_renameat2", None)
    write_folder(path, "newer")
    assert {file.read_text() for file in path.iterdir()} == {"newer"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_files_have_the_users_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "report.md", "fine")
        with whole_folder(tmp_path / "step_1") as partial:
            files.write_file(partial / "one", [b"1"])
            # As safetensors writes.
            os.close(os.open(partial / "two", os.O_CREAT | os.O_WRONLY, 0o600))
        with whole_file(tmp_path / "tensors") as file:
            file.unlink()
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    for name in ("report.md", "step_1/one", "step_1/two", "tensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode, name
