"""--ghost_mode and the format of score files: the same scores either way."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import gradsight
from gradsight.core.calls import is_suspended
from gradsight.errors import GradsightWarning
from gradsight.train.config import Settings
from gradsight.train.run import scoring_mode
from train.small import GHOST, differing, log, run, weights


@pytest.mark.parametrize("accumulated", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_pass_scores_as_two_do(accumulated: int, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": accumulated}
    two = run(tmp_path, experiment="two", ghost_mode="two_pass", **options)
    one = run(tmp_path, experiment="one", ghost_mode="concat", **options)
    ours, theirs = gradsight.read_scores(one), gradsight.read_scores(two)
    assert ours.num_rows == 4 * 4 * accumulated
    for name in ("step", "sample_id", "domain", "target", "lr"):
        assert ours[name].equals(theirs[name])
    assert ours["score"].to_numpy() == pytest.approx(theirs["score"].to_numpy(), abs=1e-6)
    assert ours["clip_coef"].to_numpy() == pytest.approx(theirs["clip_coef"].to_numpy(), rel=1e-5)


@pytest.mark.parametrize(("mode", "rows"), [("two_pass", [4, 2]), ("concat", [6])])
def test_which_rows_a_pass_has(mode: str, rows: list[int], tmp_path: Path) -> None:
    seen: list[int] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # Not in a pass aside, by which the watch looks at the first step.
        aside = mode == "concat" and is_suspended()
        if isinstance(module, nn.Embedding) and torch.is_grad_enabled() and not aside:
            seen.append(len(inputs[0]))

    handle = register_module_forward_pre_hook(note)
    try:
        run(tmp_path, ghost_mode=mode, max_steps=1)
    finally:
        handle.remove()
    assert sorted(set(seen) - {1}, reverse=True) == rows  # positions are one row for all


@pytest.mark.parametrize("mode", ["two_pass", "concat"])
def test_training_goes_on_where_there_is_no_direction(mode: str, tmp_path: Path) -> None:
    with pytest.warns(GradsightWarning, match=r"scored.*NaN or Inf.*Training goes on"):
        place = run(tmp_path, ghost_mode=mode, learning_rate=1e25, grad_clip=0.0)
    assert log(place)[-1]["step"] == 4
    assert set(gradsight.read_scores(place)["step"].to_pylist()) == {0}


def test_one_pass_trains_as_plain_training_does(tmp_path: Path) -> None:
    plain = run(tmp_path, experiment="plain", method="Regular")
    one = run(tmp_path, experiment="one", ghost_mode="concat")
    for ours, theirs in zip(log(one), log(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_one_pass_with_dropout_trains_as_plain_training_does(tmp_path: Path) -> None:
    options = {"model.dropout": 0.1}
    plain = run(tmp_path, experiment="plain", method="Regular", **options)
    one = run(tmp_path, experiment="one", **options)
    for ours, theirs in zip(log(one), log(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "auto"),
        ({"gradient_accumulation_steps": 4}, "two_pass"),
        ({"val_batch_size": 64}, "two_pass"),
        ({"ghost_mode": "concat", "gradient_accumulation_steps": 4}, "concat"),
    ],
)
def test_which_mode_a_run_has(settings: dict[str, Any], mode: str) -> None:
    assert scoring_mode(Settings(**settings)) == mode


def test_pickles_beside_the_files_change_nothing(tmp_path: Path) -> None:
    options = {"dot_prod_save_interval": 2, f"{GHOST}.per_parameter": True}
    plain = run(tmp_path, experiment="plain", **options)
    pickled = run(tmp_path, experiment="pickled", **options, **{f"{GHOST}.format": "pkl"})
    assert differing(weights(plain), weights(pickled)) == []
    assert sorted(file.name for file in (pickled / "grad_dotprods").iterdir()) == [
        "iter_000002.parquet",
        "iter_000002.pkl",
        "iter_000004.parquet",
        "iter_000004.pkl",
    ]
    table = gradsight.read_scores(pickled)
    assert table.equals(gradsight.read_scores(plain))
    columns = pickle.loads((pickled / "grad_dotprods" / "iter_000002.pkl").read_bytes())
    assert list(columns) == table.column_names
    assert all(isinstance(column, np.ndarray) and len(column) == 8 for column in columns.values())
    assert columns["score"].tolist() == table["score"].to_pylist()[:8]
    assert columns["by_parameter"].sum(1) == pytest.approx(columns["score"], abs=1e-6)
