"""Score files: what is written is what is read, a step counts once, and later steps can go."""

import math
import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from gradsight.errors import GradsightError, UsageError
from gradsight.store.score_folder import ScoreFolder, forget_scores, write_scores
from gradsight.store.scores import (
    ScoreFile,
    read_score_file,
    readable_scores,
    score_files,
    score_path,
)
from gradsight.values.scores import SampleScore, SavedScore


def row(step: int, sample_id: int | str = 0, score: float = 1.0) -> SavedScore:
    return SavedScore(
        step=step,
        sample_id=sample_id,
        domain=None,
        target="validation",
        score=score,
        lr=0.1,
        clip_coef=None,
        by_parameter=(0.25, None, 0.75),
        direction="adam",
    )


def test_rows_come_back_as_they_went(tmp_path: Path) -> None:
    path = score_path(tmp_path, 2)
    assert write_scores(path, [row(0, 7), row(1, 8, -2.0)], ScoreFile()) == []
    assert score_files(tmp_path) == [path]
    read = [SampleScore(**each) for each in read_score_file(path).to_pylist()]
    assert read == [
        SampleScore(0, 7, None, "validation", 1.0, 0.1, None),
        SampleScore(1, 8, None, "validation", -2.0, 0.1, None),
    ]


def test_columns_of_the_format(tmp_path: Path) -> None:
    plain, full = score_path(tmp_path, 1), score_path(tmp_path, 2)
    names = ("a.weight", "frozen", "a.bias")
    write_scores(plain, [row(0)], ScoreFile())
    write_scores(full, [row(1)], ScoreFile(names, has_direction=True))
    assert pyarrow.parquet.read_schema(plain).names == [
        *("step", "sample_id", "domain", "target", "score", "lr", "clip_coef")
    ]
    (saved,) = pyarrow.parquet.read_table(full).to_pylist()
    assert (saved["by_parameter"], saved["direction"]) == ([0.25, None, 0.75], "adam")
    assert pyarrow.parquet.read_schema(full).metadata == {
        b"gradsight.parameters": b'["a.weight", "frozen", "a.bias"]'
    }


def test_ids_of_two_kinds_become_text(tmp_path: Path) -> None:
    path = score_path(tmp_path, 4)
    write_scores(path, [row(0, 7)], ScoreFile())
    write_scores(path, [row(1, "eight")], ScoreFile())
    assert read_score_file(path)["sample_id"].to_pylist() == ["7", "eight"]


def test_of_a_step_in_two_files_the_later_counts(tmp_path: Path) -> None:
    write_scores(score_path(tmp_path, 2), [row(0), row(1, score=3.0)], ScoreFile())
    write_scores(score_path(tmp_path, 3), [row(1, score=4.0), row(2)], ScoreFile())
    table, unreadable = readable_scores(tmp_path)
    assert table["score"].to_pylist() == [1.0, 4.0, 1.0]
    assert unreadable == []


def test_later_steps_are_forgotten(tmp_path: Path) -> None:
    write_scores(score_path(tmp_path, 2), [row(0), row(1)], ScoreFile())
    write_scores(score_path(tmp_path, 4), [row(2), row(3)], ScoreFile(has_direction=True))
    write_scores(score_path(tmp_path, 6), [row(4)], ScoreFile())
    forget_scores(tmp_path, 3)
    assert [path.name for path in score_files(tmp_path)] == [
        "iter_000002.parquet",
        "iter_000003.parquet",
    ]
    assert readable_scores(tmp_path)[0]["step"].to_pylist() == [0, 1, 2]
    assert "direction" in pyarrow.parquet.read_schema(score_path(tmp_path, 3)).names


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = score_path(tmp_path, 2)
    write_scores(path, [row(0)], ScoreFile())

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet, "write_table", full)
        with pytest.raises(GradsightError, match=r"iter_000002.parquet: no space left on device"):
            write_scores(path, [row(1)], ScoreFile())
    assert read_score_file(path)["step"].to_pylist() == [0]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def unpickled(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The pickles of a run, by their names."""
    files = sorted((run_dir / "grad_dotprods").glob("*.pkl"))
    return {file.name: pickle.loads(file.read_bytes()) for file in files}


def test_a_pickle_has_the_columns_as_arrays(tmp_path: Path) -> None:
    folder = ScoreFolder(tmp_path, 0, 2, pickles=True)
    assert folder.write(2, [row(0, 7), row(1, 8)], ScoreFile(("a", "frozen", "b"))) == []
    folder.close()
    (columns,) = unpickled(tmp_path).values()
    assert columns["sample_id"].tolist() == [7, 8]
    assert columns["domain"].tolist() == [None, None]
    assert columns["by_parameter"].shape == (2, 3)
    assert columns["by_parameter"][0, [0, 2]].tolist() == [0.25, 0.75]
    assert math.isnan(columns["by_parameter"][0, 1])
    assert math.isnan(columns["clip_coef"][0])


def test_pickles_hold_what_their_files_hold(tmp_path: Path) -> None:
    first = ScoreFolder(tmp_path, 0, 2, pickles=True)
    first.write(2, [row(0), row(1)], ScoreFile())
    first.write(4, [row(2), row(3)], ScoreFile())
    first.close()
    second = ScoreFolder(tmp_path, 1, 2, pickles=True)
    second.forget_from(1)
    assert unpickled(tmp_path) == {}
    second.write(3, [row(1, score=5.0), row(2)], ScoreFile())
    second.close()
    (name, columns), *others = unpickled(tmp_path).items()
    assert (name, others) == ("iter_000003.pkl", [])
    assert columns["step"].tolist() == [0, 1, 2]
    assert columns["score"].tolist() == [1.0, 5.0, 1.0]


def test_files_without_a_pickle_get_one(tmp_path: Path) -> None:
    write_scores(score_path(tmp_path, 2), [row(0), row(1)], ScoreFile())
    folder = ScoreFolder(tmp_path, 2, 2, pickles=True)
    folder.write(4, [row(2)], ScoreFile())
    folder.close()
    assert list(unpickled(tmp_path)) == ["iter_000002.pkl", "iter_000004.pkl"]


def full_disk(*arguments: object) -> bytes:
    raise OSError(28, "No space left on device")


def test_a_pickle_that_cannot_be_written_is_told_and_the_scores_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ScoreFolder(tmp_path, 0, 2, pickles=True)
    monkeypatch.setattr(pickle, "dumps", full_disk)
    (fault,) = folder.write(2, [row(0)], ScoreFile())
    folder.close()
    assert "iter_000002.pkl could not be written" in fault
    assert read_score_file(score_path(tmp_path, 2)).num_rows == 1


def test_a_folder_that_was_dropped_can_be_opened_again(tmp_path: Path) -> None:
    dropped = ScoreFolder(tmp_path, 0, 2)
    with pytest.raises(UsageError, match="another GhostEngine"):
        ScoreFolder(tmp_path, 0, 2)
    del dropped
    ScoreFolder(tmp_path, 0, 2).close()
