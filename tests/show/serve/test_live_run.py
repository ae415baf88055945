"""What is read while a run grows is what would be read of it at once."""

import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from gradsight import open_run
from gradsight.show.page.heights import heights_of
from gradsight.show.page.pyramid import Columns, grid_factor
from gradsight.show.serve.live_run import LiveRun
from gradsight.show.serve.picture import Picture
from gradsight.store import tail_format as frames
from gradsight.store.stat_chunks import stat_chunks
from gradsight.store.store import open_store
from gradsight.values.steps import Step
from show.serve.served import NAMES, norm, record


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def picture_of(live: LiveRun) -> Picture:
    assert live.picture is not None
    return live.picture


def assert_equal(one: Columns, other: Columns) -> None:
    for field in fields(Columns):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


@pytest.mark.parametrize("factor", [1, 2, 8, 16, 64, 256])
def test_columns_of_a_grown_picture(factor: int, tmp_path: Path, cache: Path) -> None:
    live = LiveRun(tmp_path / "run", cache)
    for upto in (1, 7, 8, 9, 70, 500, 1100):
        record(tmp_path / "run", range(len(live.steps), upto))
        live.refresh()
    picture = picture_of(live)
    for first, last in ((0, 1100), (3, 17), (640, 1099), (1097, 1100)):
        columns = picture.columns(first, last, factor)
        begin = first // factor * factor
        assert columns.starts.tolist() == list(range(begin, last, factor))
        for place, start in enumerate(columns.starts.tolist()):
            steps = range(start, min(start + factor, last))
            assert columns.lasts[place] == steps[-1]
            for row, name in enumerate(NAMES):
                assert picture.rows.names[row] == name
                heights = heights_of(np.array([norm(step, row) for step in steps], np.float32))
                assert columns.low[place, row] == heights.min()
                assert columns.high[place, row] == heights.max()
    live.close()


def test_a_run_that_grew_is_shown_like_one_that_was_read_at_once(tmp_path: Path) -> None:
    growing = LiveRun(tmp_path / "run", tmp_path / "one")
    for upto in range(40, 640, 40):
        record(tmp_path / "run", range(len(growing.steps), upto))
        growing.refresh()
    whole = LiveRun(tmp_path / "run", tmp_path / "other")
    whole.refresh()
    assert growing.steps == whole.steps
    assert growing.lines.thinned() == whole.lines.thinned()
    assert growing.generation == whole.generation == 0
    assert_equal(picture_of(growing).columns(0, 600, 4), picture_of(whole).columns(0, 600, 4))


def test_little_by_little(tmp_path: Path, cache: Path) -> None:
    """A long run is read in parts, each of which can be shown."""
    record(tmp_path / "run", range(9000))
    live = LiveRun(tmp_path / "run", cache)
    seen = []
    while live.refresh(seconds=0.0):
        seen.append((len(live.steps), len(picture_of(live))))
    assert len(seen) > 2
    assert seen == sorted(seen)
    assert (len(live.steps), len(picture_of(live))) == (9000, 9000)
    assert not live.refresh()


def test_a_kept_picture_is_taken_up(tmp_path: Path, cache: Path) -> None:
    record(tmp_path / "run", range(3000))
    first = LiveRun(tmp_path / "run", cache)
    first.refresh()
    first.close()
    record(tmp_path / "run", range(3000, 3100))
    again = LiveRun(tmp_path / "run", cache)
    read = open_run(tmp_path / "run")
    again._take_kept(read)
    assert len(picture_of(again)) == 3000, "it was not taken up, but read again"
    again.refresh()
    other = LiveRun(tmp_path / "run", tmp_path / "elsewhere")
    other.refresh()
    one = picture_of(again).columns(0, 3100, 8)
    two = picture_of(other).columns(0, 3100, 8)
    np.testing.assert_array_equal(one.high, two.high)
    np.testing.assert_array_equal(one.low, two.low)
    assert len(again.steps) == len(other.steps) == 3100


@pytest.mark.parametrize("harm", ["another run", "cut off", "no state", "nonsense"])
def test_a_kept_picture_that_does_not_fit_is_made_anew(
    harm: str, tmp_path: Path, cache: Path
) -> None:
    record(tmp_path / "run", range(300))
    first = LiveRun(tmp_path / "run", cache)
    first.refresh()
    first.close()
    (folder,) = (cache / "pictures").iterdir()
    if harm == "another run":
        shutil.rmtree(tmp_path / "run")
        store = open_store(tmp_path / "run")
        packed = frames.pack_statistics(None, {"l2": np.ones(4), "max_abs": np.ones(4)})
        for number in range(400):
            store.add_step(Step(number, 2e9 + number), NAMES, packed)
        store.close()
    elif harm == "cut off":
        (folder / "high0").write_bytes((folder / "high0").read_bytes()[:999])
    elif harm == "no state":
        (folder / "state.json").unlink()
    else:
        (folder / "state.json").write_text('{"names": 3}')
    live = LiveRun(tmp_path / "run", cache)
    live.refresh()
    expected = LiveRun(tmp_path / "run", tmp_path / "elsewhere")
    expected.refresh()
    columns = picture_of(live).columns(0, 400, 2)
    assert_equal(columns, picture_of(expected).columns(0, 400, 2))


def test_a_second_reader_and_a_reader_without_a_home(tmp_path: Path, cache: Path) -> None:
    record(tmp_path / "run", range(50))
    (tmp_path / "file").write_text("no folder")
    readers = [
        LiveRun(tmp_path / "run", cache),
        LiveRun(tmp_path / "run", cache),
        LiveRun(tmp_path / "run", tmp_path / "file"),
    ]
    for live in readers:
        live.refresh()
    record(tmp_path / "run", range(50, 60))
    for live in readers:
        live.refresh()
        assert len(picture_of(live)) == 60
    for live in readers:
        live.close()


def test_a_run_that_is_started_again(tmp_path: Path, cache: Path) -> None:
    record(tmp_path / "run", range(100))
    live = LiveRun(tmp_path / "run", cache)
    live.refresh()
    store = open_store(tmp_path / "run")
    store.forget_from(60)
    packed = frames.pack_statistics(None, {"l2": np.full(4, 9.0), "max_abs": np.ones(4)})
    for number in range(60, 130):
        store.add_step(Step(number, 3e9 + number), NAMES, packed)
    store.close()
    live.refresh()
    assert live.generation > 0
    assert len(live.steps) == len(picture_of(live)) == 130
    columns = picture_of(live).columns(0, 130, 1)
    np.testing.assert_allclose(columns.high[60:, 0], np.log2(9.0), rtol=1e-6)
    assert columns.high[59, 0] == heights_of(np.array([norm(59, 0)], np.float32))[0]


def test_a_loss_that_comes_after_its_step(tmp_path: Path, cache: Path) -> None:
    store = open_store(tmp_path / "run")
    store.add_step(Step(0, 1.0), NAMES)
    store.flush()
    live = LiveRun(tmp_path / "run", cache)
    live.refresh()
    assert "loss" not in live.lines.thinned()
    store.add_step_scalars(0, {"loss": 7.0})
    store.add_step(Step(1, 2.0, loss=6.0), NAMES)
    store.flush()
    live.refresh()
    store.close()
    assert [step.loss for step in live.steps] == [7.0, 6.0]
    assert live.lines.thinned()["loss"]["first"] == 7.0


def test_a_run_that_is_removed_and_one_that_comes_in_its_place(tmp_path: Path, cache: Path) -> None:
    record(tmp_path / "run", range(40))
    live = LiveRun(tmp_path / "run", cache)
    live.refresh()
    shutil.rmtree(tmp_path / "run")
    live.refresh()
    assert live.trouble is not None
    assert "no run directory" in live.trouble
    assert len(live.steps) == 40, "what was read is still shown"
    record(tmp_path / "run", range(10))
    live.refresh()
    assert live.trouble is None
    assert live.generation > 0
    assert len(live.steps) == 10


def test_parameters_that_come_later(tmp_path: Path, cache: Path) -> None:
    store = open_store(tmp_path / "run")
    live = LiveRun(tmp_path / "run", cache)
    for names in (["a"], ["a", "b"]):
        values = np.ones(len(names))
        packed = frames.pack_statistics(None, {"l2": values, "max_abs": values})
        for number in range(len(live.steps), len(live.steps) + 10):
            store.add_step(Step(number, 1.0 + number), names, packed)
        store.flush()
        while live.refresh():
            pass
    store.close()
    picture = picture_of(live)
    assert picture.rows.names == ["a", "b"]
    high = picture.columns(0, 20, 1).high
    assert np.isneginf(high[:10, 1]).all()
    assert (high[10:] == 0).all()


def test_a_chunk_in_parts_is_the_chunk(tmp_path: Path) -> None:
    record(tmp_path / "run", range(20))
    run = open_run(tmp_path / "run")
    (chunk,) = run.stat_chunks()
    part = chunk.at(np.array([3, 5]))
    assert part.steps.tolist() == [3, 5]
    np.testing.assert_array_equal(part.l2, chunk.l2[[3, 5]])
    assert list(stat_chunks([])) == []
    assert grid_factor(20, 20) == 1
