"""No link below a folder is followed, for reading, writing or removing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

import pytest

from gradsight.core import places
from gradsight.errors import GradsightError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with a file, a folder, and links out of it at two depths; the run itself is a link."""
    outside = tmp_path / "outside"
    run = tmp_path / "run"
    (outside / "inner").mkdir(parents=True)
    (outside / "secret").write_text("secret")
    (run / "folder").mkdir(parents=True)
    (run / "folder" / "file").write_text("ours")
    (run / "link").symlink_to(outside / "secret")
    (run / "way").symlink_to(outside)
    (run / "folder" / "way").symlink_to(outside)
    os.mkfifo(run / "fifo")
    (tmp_path / "given").symlink_to(run)
    return tmp_path / "given"


def test_what_is_inside_is_read(root: Path) -> None:
    assert places.read_file(root, "folder/file", 100) == b"ours"
    assert places.names_in(root, "folder") == ["file", "way"]
    assert places.names_in(root, "nowhere") == []
    assert places.refuse_links(root, "folder/file").read_text() == "ours"
    assert places.refuse_links(root, "nowhere/file") == root / "nowhere/file"


LED_OUT = ["link", "way/secret", "folder/way/secret", "../outside/secret"]


@pytest.mark.parametrize("file", LED_OUT)
def test_no_way_leads_out(root: Path, file: str) -> None:
    outside = (root.resolve().parent / "outside" / "secret").resolve()
    for reach in (
        lambda: places.read_file(root, file, 100),
        lambda: places.open_file(root, file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        lambda: places.refuse_links(root, file),
    ):
        with pytest.raises(GradsightError, match=r"not followed|leads out"):
            reach()
    with pytest.raises(GradsightError, match=r"not followed|leads out"):
        places.remove_below(root, f"{file}/more")
    assert outside.read_text() == "secret"


def test_an_absolute_path_leads_out(root: Path) -> None:
    with pytest.raises(GradsightError, match="leads out"):
        places.read_file(root, root.resolve().parent / "outside" / "secret", 100)


def test_only_plain_files_are_opened_and_nobody_waits(root: Path) -> None:
    for name in ("fifo", "folder"):
        with pytest.raises(GradsightError, match="not a plain file"):
            places.read_file(root, name, 100)


def test_a_file_beyond_its_limit_is_refused(root: Path) -> None:
    with pytest.raises(GradsightError, match="4 bytes; at most 3"):
        places.read_file(root, "folder/file", 3)


def test_a_link_is_removed_and_not_what_it_leads_to(root: Path) -> None:
    for name in ("way", "link", "folder"):
        places.remove_below(root, name)
    places.remove_below(root, "nowhere")
    assert places.names_in(root) == ["fifo"]
    assert (root.resolve().parent / "outside" / "secret").read_text() == "secret"
    assert (root.resolve().parent / "outside" / "inner").is_dir()


def test_a_folder_is_made_while_others_tidy_its_parent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks do with incidents: one gives up its own while another begins."""
    tidied = []

    @contextmanager
    def open_after_tidying(root: Path, folder: PurePath) -> Iterator[int]:
        if len(tidied) < 3 and (tmp_path / "incidents").exists():
            tidied.append(folder)
            (tmp_path / "incidents").rmdir()
        with open_folder(root, folder) as opened:
            yield opened

    open_folder = places.open_folder
    monkeypatch.setattr(places, "open_folder", open_after_tidying)
    places.make_below(tmp_path, "incidents/7", sync=False)
    assert (tmp_path / "incidents" / "7").is_dir()
    assert len(tidied) == 3
