"""Score files: what is written is what is read, a step counts once, and later steps can go."""

from pathlib import Path

import pyarrow.parquet
import pytest

from gradsight.errors import GradsightError
from gradsight.store.score_folder import forget_scores, write_scores
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
