"""read_scores: a run's scores as one table, or a clear word why there are none."""

import subprocess
import sys
from pathlib import Path

import pytest

import gradsight
from gradsight.errors import RunError, UsageError, WrongPlace
from gradsight.store.score_folder import write_scores
from gradsight.store.scores import ScoreFile, score_path
from store.test_score_files import row

COLUMNS = ["step", "sample_id", "domain", "target", "score", "lr", "clip_coef"]


def test_a_run_and_its_folder_give_the_same_table(tmp_path: Path) -> None:
    write_scores(score_path(tmp_path, 2), [row(0, 7), row(1, 8, -2.0)], ScoreFile())
    write_scores(score_path(tmp_path, 4), [row(2, 9)], ScoreFile())
    table = gradsight.read_scores(tmp_path)
    assert table.column_names == COLUMNS
    assert table["sample_id"].to_pylist() == [7, 8, 9]
    assert table["score"].to_pylist() == [1.0, -2.0, 1.0]
    assert gradsight.read_scores(str(tmp_path / "grad_dotprods")).equals(table)


def test_of_a_step_in_two_files_the_later_counts(tmp_path: Path) -> None:
    write_scores(score_path(tmp_path, 2), [row(0), row(1, score=3.0)], ScoreFile())
    write_scores(score_path(tmp_path, 3), [row(1, score=4.0), row(2)], ScoreFile())
    table = gradsight.read_scores(tmp_path)
    assert table["step"].to_pylist() == [0, 1, 2]
    assert table["score"].to_pylist() == [1.0, 4.0, 1.0]


def test_ids_are_text_where_one_file_has_text(tmp_path: Path) -> None:
    write_scores(score_path(tmp_path, 1), [row(0, 7)], ScoreFile())
    write_scores(score_path(tmp_path, 2), [row(1, "eight")], ScoreFile())
    assert gradsight.read_scores(tmp_path)["sample_id"].to_pylist() == ["7", "eight"]


def test_columns_that_only_some_files_have(tmp_path: Path) -> None:
    names = ("a.weight", "frozen", "a.bias")
    write_scores(score_path(tmp_path, 1), [row(0)], ScoreFile())
    write_scores(score_path(tmp_path, 2), [row(1)], ScoreFile(("other", "model", "s")))
    write_scores(score_path(tmp_path, 3), [row(2)], ScoreFile(names, has_direction=True))
    table = gradsight.read_scores(tmp_path)
    assert table.column_names == [*COLUMNS, "by_parameter", "direction"]
    # Parts in the order of another model's parameters would be taken for this one's.
    assert table["by_parameter"].to_pylist() == [None, None, [0.25, None, 0.75]]
    assert table["direction"].to_pylist() == [None, None, "adam"]
    assert table.schema.metadata == {b"gradsight.parameters": b'["a.weight", "frozen", "a.bias"]'}


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(WrongPlace, match=r"there is no folder at .*nowhere"):
        gradsight.read_scores(tmp_path / "nowhere")
    for wrong in (None, 3, "", b"runs"):
        with pytest.raises(UsageError, match="run_dir must be a path, such as 'runs/first'"):
            gradsight.read_scores(wrong)
    with pytest.raises(WrongPlace, match=r"holds no scores: expected grad_dotprods/iter_\*"):
        gradsight.read_scores(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_scores(score_path(tmp_path, 1), [row(0)], ScoreFile())
    score_path(tmp_path, 2).write_bytes(b"not a table")
    with pytest.raises(RunError, match=r"iter_000002.parquet cannot be read"):
        gradsight.read_scores(tmp_path)


def test_torch_is_not_needed(tmp_path: Path) -> None:
    write_scores(score_path(tmp_path, 1), [row(0)], ScoreFile())
    script = (
        "import sys, gradsight\n"
        f"assert gradsight.read_scores({str(tmp_path)!r}).num_rows == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
