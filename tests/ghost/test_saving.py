"""Scores on disk: complete files, every column, and training that survives a bad disk."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from ghost.small import loss_fn, pair, small
from gradsight import GhostEngine, GradsightError, open_run, watch
from gradsight.cli import main
from gradsight.errors import GradsightWarning
from gradsight.show.markdown import report_text
from gradsight.show.summary import summarize


def train(
    engine: GhostEngine, optimizer: torch.optim.Optimizer, steps: int, micro: int = 1
) -> None:
    for step in range(steps):
        for part in range(micro):
            ids = [f"{step}-{part}-{row}" for row in range(2)]
            with engine.observe(sample_ids=ids, domains=["code", None]):
                loss_fn(engine.model, pair(2, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_observed_steps_are_saved(tmp_path: Path) -> None:
    model = small()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    targets = {"a": pair(3, 2), "b": pair(2, 3)}
    engine = GhostEngine(
        model,
        loss_fn,
        targets=targets,
        optimizer=optimizer,
        run_dir=tmp_path,
        save_interval=4,
        per_parameter=True,
    )
    train(engine, optimizer, 6, micro=2)
    engine.close()
    engine.close()
    folder = tmp_path / "grad_dotprods"
    assert sorted(p.name for p in folder.iterdir()) == [
        "iter_000004.parquet",
        "iter_000006.parquet",
    ]
    table = pyarrow.parquet.read_table(folder / "iter_000004.parquet")
    rows = table.to_pylist()
    assert len(rows) == 4 * 2 * 2 * 2
    assert {r["step"] for r in rows} == {0, 1, 2, 3}
    assert {(r["target"], r["domain"]) for r in rows} == {
        ("a", "code"),
        ("a", None),
        ("b", "code"),
        ("b", None),
    }
    assert all(r["clip_coef"] == pytest.approx(1.0) and r["lr"] == 0.1 for r in rows)
    names = json.loads(table.schema.metadata[b"gradsight.parameters"])
    assert names == [name for name, _ in model.named_parameters()]
    for row in rows:
        assert len(row["by_parameter"]) == len(names)
        for name, value in zip(names, row["by_parameter"], strict=True):
            assert (value is None) == name.startswith("blocks.0.")
        assert sum(v for v in row["by_parameter"] if v is not None) == pytest.approx(row["score"])


def test_training_goes_on_when_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "grad_dotprods").write_text("in the way")
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(
        model, loss_fn, pair(3, 2), optimizer=optimizer, run_dir=tmp_path, save_interval=1
    )
    with pytest.warns(GradsightWarning, match="training goes on, these scores are lost") as seen:
        train(engine, optimizer, 4)
    assert len(seen) == 1
    (problem,) = open_run(tmp_path).problems()
    assert (problem.key, problem.first_step, problem.count) == ("scores", 1, 4)
    main(["report", str(tmp_path)])
    assert "these scores are lost" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("content", [b"", b"not parquet", b"PAR1 cut short PAR1"])
def test_a_damaged_file_is_put_aside(content: bytes, tmp_path: Path) -> None:
    damaged = tmp_path / "grad_dotprods" / "iter_000002.parquet"
    damaged.parent.mkdir()
    damaged.write_bytes(content)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(
        model,
        loss_fn,
        pair(3, 2),
        optimizer=optimizer,
        run_dir=tmp_path,
        save_interval=2,
        start_step=0,
    )
    with pytest.warns(
        GradsightWarning,
        match=r"iter_000002.parquet cannot be read: .*it is now iter_000002.damaged",
    ):
        train(engine, optimizer, 2)
    (problem,) = open_run(tmp_path).problems()
    assert (problem.key, problem.count) == ("damaged scores", 1)
    assert damaged.with_suffix(".damaged").read_bytes() == content
    assert set(pyarrow.parquet.read_table(damaged)["step"].to_pylist()) == {0, 1}


def test_training_goes_on_whatever_saving_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(
        model, loss_fn, pair(3, 2), optimizer=optimizer, run_dir=tmp_path, save_interval=1
    )

    def broken(*args: object, **options: object) -> None:
        raise ModuleNotFoundError("No module named 'pyarrow'")

    monkeypatch.setattr(pyarrow.parquet, "write_table", broken)
    with pytest.warns(
        GradsightWarning, match="ModuleNotFoundError: .*training goes on, these scores are lost"
    ) as seen:
        train(engine, optimizer, 3)
    assert len(seen) == 1


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(
        model, loss_fn, pair(3, 2), optimizer=optimizer, run_dir=tmp_path, save_interval=100
    )
    train(engine, optimizer, 2)

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(
        Exception, match=r"could not be written to .*iter_000002.parquet: no space left"
    ):
        engine.save(2)
    assert list((tmp_path / "grad_dotprods").iterdir()) == []


def test_without_a_run_dir_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(model, loss_fn, pair(3, 2), optimizer=optimizer, save_interval=1)
    train(engine, optimizer, 3)
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_at_the_end_is_in_the_record_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(model, loss_fn, pair(3, 2), optimizer=optimizer, run_dir=tmp_path)
    train(engine, optimizer, 2)

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(GradsightError, match="no space left"):
        engine.close()
    run = open_run(tmp_path)
    (problem,) = run.problems()
    assert "no space left" in problem.message
    assert "no space left" in report_text(summarize(run))


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_a_score_file_that_is_not_whole_is_in_the_record_and_the_report(
    what: str, tmp_path: Path
) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = GhostEngine(
        model, loss_fn, pair(3, 2), optimizer=optimizer, run_dir=tmp_path, save_interval=2
    )
    with watch(model, optimizer, run_dir=tmp_path, quiet=True):
        train(engine, optimizer, 6)
        engine.close()
    assert list(open_run(tmp_path).problems()) == []
    file = tmp_path / "grad_dotprods" / "iter_000004.parquet"
    data = bytearray(file.read_bytes())
    file.unlink()
    if what == "damaged":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    run = open_run(tmp_path)
    (problem,) = run.problems()
    assert problem.key == "scores iter_000004.parquet"
    assert what in problem.message
    assert problem.first_step == 2
    text = report_text(summarize(run))
    assert text.count("iter_000004.parquet") == 1
