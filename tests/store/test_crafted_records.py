"""A record that a stranger made is read within limits, or refused in words."""

import json
import os
import sqlite3
import struct
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from gradsight import open_run
from gradsight.core import limits, rundir
from gradsight.errors import RunError, WrongPlace
from gradsight.store import record_file, tail_file
from gradsight.store import tail_format as frames
from gradsight.store.record_file import seal
from gradsight.store.store import open_store
from store.crafted import change, everything, fill, refusals, small_run

ENDLESS = "SELECT a.step, 1.0 FROM s a, s b, s c, s d, s e, s f, s g, s h, s i, s j"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    for name in (rundir.RECORD, rundir.TAIL, rundir.CONFIG):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    return tmp_path


def test_an_untouched_copy_is_read(run_dir: Path) -> None:
    assert list(refusals(run_dir)) == []
    found = everything(run_dir)
    assert {name for name, records in found.items() if not records} == {
        "memory",
        "scores",
        "incidents",
    }


@pytest.mark.parametrize(
    "script",
    [
        "DROP TABLE steps; CREATE VIEW steps AS SELECT * FROM stats",
        "DROP TABLE meta; CREATE VIEW meta AS SELECT 'schema' AS key, 2 AS value",
        f"ALTER TABLE steps RENAME TO s; CREATE VIEW steps AS {ENDLESS}",
        "CREATE TRIGGER t AFTER INSERT ON steps BEGIN DELETE FROM steps; END",
        "CREATE TABLE recipes (name)",
        "CREATE INDEX i ON steps (loss)",
        "ALTER TABLE steps ADD COLUMN more",
        "DROP TABLE stats; CREATE TABLE stats (step INTEGER PRIMARY KEY, layout, "
        "packed AS (zeroblob(1000000000)))",
        "DROP TABLE stats",
        "CREATE VIRTUAL TABLE v USING fts5(a)",
    ],
)
def test_only_our_tables_are_read(script: str, run_dir: Path) -> None:
    """A query without end would run into the time limit that every test has."""
    change(run_dir, script)
    (said,) = refusals(run_dir)
    assert "run.sqlite" in said


@pytest.mark.parametrize(
    ("script", "values"),
    [
        ("UPDATE steps SET loss = 'one'", ()),
        ("UPDATE steps SET loss = ?", (b"bytes",)),
        ("UPDATE steps SET gradient = ?", (b"bytes",)),
        ("UPDATE steps SET gradient = CAST(x'ff' AS TEXT)", ()),
        ("UPDATE steps SET time = 'nun'", ()),
        ("UPDATE steps SET skipped = 'yes'", ()),
        ("UPDATE stats SET packed = 'text'", ()),
        ("UPDATE stats SET layout = 5", ()),
        ("UPDATE stats SET layout = 'x'", ()),
        ("UPDATE stats SET packed = ?", (struct.pack("<BBI", 3, 0, 2**31),)),
        ("UPDATE stats SET packed = ?", (struct.pack("<BBI", 0, 0, 2**32 - 1),)),
        ("UPDATE stats SET packed = ?", (b"",)),
        ("UPDATE stats SET packed = ?", (struct.pack("<BBII", 0, 2, 1, 77),)),
        ("UPDATE layouts SET names = ?", ("[" * 10**5,)),
        ("UPDATE layouts SET names = ?", ('{"a": 1}',)),
        ("UPDATE layouts SET names = ?", ("[1, 2]",)),
        ("UPDATE layouts SET names = ?", ("nonsense",)),
        ("UPDATE histograms SET packed = ?", (b"nonsense",)),
        ("UPDATE histograms SET packed = ?", (zlib.compress(b"[1]"),)),
        ("UPDATE histograms SET packed = ?", (zlib.compress(b"{}"),)),
        ("UPDATE histograms SET packed = ?", (zlib.compress(b'[["a"]]'),)),
        ("UPDATE histograms SET packed = ?", (zlib.compress(b" " * (limits.HISTOGRAM_BYTES + 9)),)),
        ("UPDATE histograms SET packed = ?", (zlib.compress(b"[" * 10**6),)),
        ("UPDATE histograms SET source = ?", (b"x",)),
        ("UPDATE scalars SET value = 'x'", ()),
        ("UPDATE tracked SET value = 'x'", ()),
        ("UPDATE experts SET packed = ?", (b"",)),
        ("UPDATE experts SET packed = ?", (b"\4abcde",)),
        ("UPDATE experts SET packed = 'x'", ()),
        ("UPDATE records SET value = '5'", ()),
        ("UPDATE records SET value = '{}'", ()),
        ("UPDATE records SET value = ?", ('{"a":' * 10**5,)),
        ("UPDATE records SET value = '{\"severity\": 3}' WHERE kind = 'finding'", ()),
        ("UPDATE records SET value = ?", (b"bytes",)),
        ("UPDATE records SET step = 'x'", ()),
        ("DELETE FROM meta WHERE key = 'last_frame'", ()),
        ("UPDATE meta SET value = 'x'", ()),
        ("UPDATE meta SET value = NULL WHERE key = 'run'", ()),
    ],
)
def test_values_of_other_types_are_refused(script: str, values: object, run_dir: Path) -> None:
    change(run_dir, script, values)
    said = list(refusals(run_dir))
    assert said
    assert all(len(text) < 1000 for text in said)


def finding(**more: object) -> str:
    body = {
        "code": "GS103",
        "name": "n",
        "severity": "critical",
        "parameters": ["a"],
        "first_step": 1,
        "evidence": "",
        "message": "",
        "recommendation": "",
        "fix": "",
    }
    return json.dumps({**body, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"parameters": "abc"},
        {"parameters": [1]},
        {"severity": "dreadful"},
        {"first_step": "one"},
        {"first_step": 10**30},
        {"diagnosis": {"operation": 1}},
        {"diagnosis": []},
        {"incident": 5},
        {"unheard": 1},
        {"code": None},
    ],
)
def test_findings_of_other_shapes_are_refused(more: dict[str, object], run_dir: Path) -> None:
    change(run_dir, "UPDATE records SET value = ? WHERE kind = 'finding'", (finding(**more),))
    with pytest.raises(RunError, match=r"run\.sqlite"):
        list(open_run(run_dir).findings())
    assert len(list(open_run(run_dir).steps())) == 5


def test_a_newer_schema_is_refused_with_the_version_it_takes(run_dir: Path) -> None:
    script = "UPDATE meta SET value = 99 WHERE key = 'schema';"
    change(run_dir, script + "UPDATE meta SET value = '7.1.0' WHERE key = 'reader'")
    said = r"has schema 99, this Gradsight reads up to 2: .* takes Gradsight 7\.1\.0 or later"
    for opening in (open_run, open_store):
        with pytest.raises(WrongPlace, match=said):
            opening(run_dir)
    # Changed by a program that knows nothing of checksums.
    with closing(sqlite3.connect(run_dir / rundir.RECORD)) as connection:
        connection.execute("UPDATE meta SET value = 98 WHERE key = 'schema'")
        connection.commit()
    with pytest.raises(RunError, match=r"damaged: .* unless it was written by a newer version"):
        open_run(run_dir)


def test_a_journal_of_a_strangers_removes_nothing(run_dir: Path, tmp_path: Path) -> None:
    """A hot rollback journal names a super-journal, which SQLite removes when it rolls back."""
    victim = tmp_path / "precious"
    victim.write_text("precious")
    name = str(victim).encode()
    sector = 512
    pages = (run_dir / rundir.RECORD).stat().st_size // 16384
    head = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", 0, 1, pages, sector, 16384)
    checksum = sum(name)
    tail = struct.pack(">I", 1) + name + struct.pack(">II", len(name), checksum)
    journal = head.ljust(sector, b"\0") + tail + bytes.fromhex("d9d505f920a163d7")
    place = run_dir / "run.sqlite-journal"
    place.write_bytes(journal)
    before = {file.name: file.read_bytes() for file in run_dir.iterdir()}
    assert list(refusals(run_dir)) == []
    assert {file.name: file.read_bytes() for file in run_dir.iterdir()} == before
    store = open_store(run_dir)
    store.add_problem(next(iter(open_run(run_dir).problems())))
    store.close()
    assert victim.read_text() == "precious"
    # As SQLite itself would open it.
    place.write_bytes(journal)
    with closing(sqlite3.connect(run_dir / rundir.RECORD)) as connection:
        connection.execute("SELECT count(*) FROM steps").fetchone()
    assert not victim.exists(), "this journal does no harm to anybody, and proves nothing"


@pytest.mark.parametrize("name", [rundir.RECORD, rundir.TAIL, rundir.CONFIG])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_plain_files_are_opened(name: str, kind: str, run_dir: Path) -> None:
    place = run_dir / name
    target = run_dir.parent / f"{kind}-target"
    place.rename(target)
    if kind == "link":
        place.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.mkdir()
    before = target.read_bytes()
    with pytest.raises(RunError, match=name):
        _ = open_run(run_dir).config
    if name != rundir.CONFIG:
        with pytest.raises((RunError, OSError)):
            open_store(run_dir)
    assert target.read_bytes() == before


def test_a_tail_of_another_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    store = open_store(other)
    for name in (rundir.RECORD, rundir.TAIL):
        assert (other / name).exists()
    (run_dir / rundir.TAIL).write_bytes((other / rundir.TAIL).read_bytes())
    store.close()
    with pytest.raises(RunError, match="the tail of another run"):
        open_run(run_dir)
    with pytest.raises(RunError, match="is not the tail of the record beside it"):
        open_store(run_dir)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (99, b""),
        (frames.STEP, b""),
        (frames.STEP, b"\xff" * 200),
        (frames.SCALARS, struct.pack("<q", 1) + b"[1]"),
        (frames.SCALARS, struct.pack("<q", 1) + b'{"a": "b"}'),
        (frames.STEP_SCALARS, struct.pack("<q", 1) + b'{"loss": [1]}'),
        (frames.TRACKED, b"abc"),
        (frames.RECORD, b"[1, 2, 3, 4]"),
        (frames.RECORD, b'["a", "b", 1]'),
        (frames.RECORD, b'["a", "b", 99999999999999999999999, {}]'),
        (frames.RECORD, b"[" * 10**5),
        (frames.LAYOUT, b"\0"),
        (frames.LAYOUT, bytes(8) + b"\xff"),
        (frames.HISTOGRAMS, b"\0" * 3),
        (frames.FORGET, b"\0" * 3),
    ],
)
def test_frames_of_strangers_are_refused(kind: int, payload: bytes, run_dir: Path) -> None:
    tail = (run_dir / rundir.TAIL).read_bytes()
    assert len(tail) == tail_file.HEADER.size
    number = tail_file.HEADER.unpack(tail)[2]
    (run_dir / rundir.TAIL).write_bytes(tail + tail_file.pack_frame(number, kind, payload))
    with pytest.raises(RunError, match=r"frame|record|list"):
        open_run(run_dir)


def test_a_tree_that_shares_its_pages_is_not_walked_for_ever(run_dir: Path) -> None:
    """Inner pages that all point to the same leaves would give rows without end."""
    file = run_dir / rundir.RECORD
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version = 0")
        rows = [(number, number, 0.5) for number in range(5000)]
        connection.executemany("INSERT OR REPLACE INTO tracked VALUES (?, ?, ?)", rows)
        connection.commit()
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'tracked'"
        ).fetchone()
    data = bytearray(file.read_bytes())
    page = (root - 1) * 16384
    assert data[page] == 2, "the root of an index with pages below it"
    cells = int.from_bytes(data[page + 3 : page + 5], "big")
    first = int.from_bytes(data[page + 12 : page + 14], "big")
    child = data[page + first : page + first + 4]
    for cell in range(cells):
        at = page + int.from_bytes(data[page + 12 + 2 * cell : page + 14 + 2 * cell], "big")
        data[at : at + 4] = child
    file.write_bytes(data)
    with file.open("r+b") as opened:
        seal(opened.fileno())
    with pytest.raises(RunError, match=r"not in order|malformed"):
        list(open_run(run_dir).scalars())


def test_checksums_are_remembered_only_of_files_that_have_settled(run_dir: Path) -> None:
    assert not record_file._proven or open_run(run_dir)
    file = run_dir / rundir.RECORD
    os.utime(file, (1e9, 1e9))
    open_run(run_dir)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match="damaged"):
        open_run(run_dir)


@pytest.mark.parametrize("limit", ["STEPS", "SCALARS", "TAIL_FRAMES"])
def test_what_is_more_than_can_be_held_is_refused(
    limit: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradsight.store import record_view

    store = open_store(run_dir)
    fill(store, range(5, 9))
    assert not list(refusals(run_dir))
    if limit == "TAIL_FRAMES":
        monkeypatch.setattr(limits, limit, 3)
        with pytest.raises(RunError, match="more frames than can be read"):
            open_run(run_dir)
    else:
        table = {"STEPS": "steps", "SCALARS": "scalars"}[limit]
        monkeypatch.setitem(record_view._MOST_ROWS, table, 4)
        assert any(f"more than 4 rows of {table}" in said for said in refusals(run_dir))
    store.close()


def test_a_reader_that_asks_for_long_does_not_run_out_of_patience(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server asks the same run again and again."""
    monkeypatch.setattr(record_file, "_OPERATIONS", 1)
    monkeypatch.setattr(limits, "QUIET_OPERATIONS", 300)
    run = open_run(run_dir)
    for _ in range(200):
        assert run.next_step() == 5
        assert run.measured_steps() == [0, 1, 2, 3, 4]
        assert len(list(run.steps())) == 5
