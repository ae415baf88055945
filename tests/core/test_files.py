"""Files and folders are there whole or not at all, and durable before they get their name."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradsight.core.files import whole_file, whole_folder, write_text

CALLS = ("open", "fsync", "rename", "replace", "rmdir", "unlink", "close")


def watch_calls(monkeypatch: pytest.MonkeyPatch, before: Callable[[str, Any], None]) -> None:
    """Have `before` see every thing asked of the system."""

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            before(name, arguments[0])
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def write_folder(path: Path, text: str) -> None:
    with whole_folder(path, path.with_name("partial")) as partial:
        (partial / "one").write_text(text)
        (partial / "two").write_text(text)


def test_the_disk_has_a_file_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def note(name: str, what: Any) -> None:
        if name == "fsync":
            order.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{what}')).name}")
        elif name == "replace":
            order.append("replace")

    watch_calls(monkeypatch, note)
    write_text(tmp_path / "report.md", "fine")
    assert order == ["fsync report.md.partial", "replace", f"fsync {tmp_path.name}"]
    assert (tmp_path / "report.md").read_text() == "fine"


def test_the_disk_has_a_folder_and_its_files_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def note(name: str, what: Any) -> None:
        if name == "fsync":
            order.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{what}')).name}")
        elif name == "rename":
            order.append("rename")

    watch_calls(monkeypatch, note)
    write_folder(tmp_path / "step_1", "new")
    assert sorted(order[:2]) == ["fsync one", "fsync two"]
    assert order[2:] == ["fsync partial", "rename", f"fsync {tmp_path.name}"]


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
