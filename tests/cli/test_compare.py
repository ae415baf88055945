"""gradsight compare: the first step and parameter where two runs differ, and what else does."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradsight
from gradsight.cli import main
from gradsight.core import rundir
from gradsight.store import tail_format as frames
from gradsight.store.run_files import write_config
from gradsight.store.store import open_store
from gradsight.values.findings import Finding
from gradsight.values.steps import Step


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page goes to the working directory."""
    monkeypatch.chdir(tmp_path)


NAMES = ["a.weight", "a.bias", "b.weight"]
Norms = dict[tuple[int, str], float | None]


def write(
    folder: Path,
    steps: range = range(20),
    other: Norms | None = None,
    names: list[str] = NAMES,
    **numbers: Callable[[int], float | None],
) -> Path:
    """A run with a norm of 1 + step for every parameter, apart from the other ones."""
    store = open_store(folder)
    for number in steps:
        given = {name: (other or {}).get((number, name), 1.0 + number) for name in names}
        rows = [place for place, name in enumerate(names) if given[name] is not None]
        norms = np.array([given[names[row]] for row in rows], dtype=np.float64)
        packed = frames.pack_statistics(rows, {"l2": norms, "max_abs": norms / 2}, wide=True)
        more: dict[str, Any] = {name: of(number) for name, of in numbers.items()}
        store.add_step(Step(number, 1.0, **{"loss": 2.0, "lr": 0.1, **more}), names, packed)
    store.close()
    write_config(folder, {"settings": {"watch": {"health": True}}, "versions": {"torch": "2.13"}})
    return folder


def compared(capsys: pytest.CaptureFixture[str], *tokens: str | Path) -> tuple[int, dict[str, Any]]:
    code = main(["compare", *map(str, tokens), "--json"])
    return code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def first(found: dict[str, Any]) -> tuple[int, str | None, str] | None:
    if found["first"] is None:
        return None
    return found["first"]["step"], found["first"]["parameter"], found["first"]["what"]


@pytest.mark.parametrize(
    ("changes", "exact", "expected"),
    [
        ({}, False, None),
        ({}, True, None),
        ({"other": {(7, "a.bias"): 8 * (1 + 9e-5)}}, False, None),
        ({"other": {(7, "a.bias"): 8 * (1 + 1e-9)}}, True, (7, "a.bias", "l2")),
        ({"other": {(7, "a.bias"): 8 * (1 + 2e-4)}}, False, (7, "a.bias", "l2")),
        ({"other": {(7, "a.bias"): 9.0, (5, "b.weight"): 1.0}}, False, (5, "b.weight", "l2")),
        ({"other": {(7, "b.weight"): 9.0, (7, "a.bias"): 9.0}}, False, (7, "a.bias", "l2")),
        ({"other": {(7, "a.bias"): None}}, False, (7, "a.bias", "l2")),
        ({"other": {(7, "a.bias"): math.nan}}, False, (7, "a.bias", "l2")),
        ({"other": {(7, "a.bias"): math.inf}}, False, (7, "a.bias", "l2")),
        ({"other": {(7, "a.bias"): 0.0}}, False, (7, "a.bias", "l2")),
        ({"steps": range(30)}, True, None),
        ({"steps": range(10, 30)}, True, None),
        ({"steps": range(0, 20, 2)}, False, (1, None, "missing")),
        ({"steps": range(40, 50)}, False, None),
        ({"names": NAMES[:2]}, False, (0, "b.weight", "l2")),
        ({"names": [*NAMES, "c"]}, False, (0, "c", "l2")),
        ({"names": NAMES[::-1]}, True, None),
        ({"loss": lambda step: 2.0 + (step == 3)}, False, (3, None, "loss")),
        ({"loss": lambda step: None}, True, None),
        ({"lr": lambda step: 0.1 + step * 1e-3}, False, (1, None, "lr")),
        ({"total_norm": lambda step: math.nan}, True, None),
    ],
)
def test_where_two_runs_part(
    changes: dict[str, Any],
    exact: bool,
    expected: object,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", **changes)
    same = expected is None and changes.get("steps") != range(40, 50)
    for one, other in (("a", "b"), ("b", "a")):
        options = ["--exact"] * exact
        code, found = compared(capsys, tmp_path / one, tmp_path / other, *options)
        assert first(found) == expected
        assert (found["same"], code) == (same, int(not same))


def test_what_is_broken_alike_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken: Norms = {(3, "a.bias"): math.nan, (4, "a.bias"): math.inf, (5, "a.bias"): None}
    for name in "ab":
        write(tmp_path / name, other=broken, loss=lambda step: math.nan)
    code, found = compared(capsys, tmp_path / "a", tmp_path / "b", "--exact")
    assert (code, found["same"], found["first"]) == (0, True, None)


def test_what_is_zero_on_paper_is_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", other={(7, "a.bias"): 1e-9})
    write(tmp_path / "b", other={(7, "a.bias"): 3e-9})
    assert compared(capsys, tmp_path / "a", tmp_path / "b")[0] == 0
    assert compared(capsys, tmp_path / "a", tmp_path / "b", "--exact")[0] == 1


def test_everything_else_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", steps=range(24))
    config = {"settings": {"watch": {"health": False}, "x": 1}, "versions": {"torch": "2.12"}}
    write_config(tmp_path / "b", config)
    store = open_store(tmp_path / "b")
    store.add_finding(Finding("GS201", "spike", "warning", (), 5, "", "", "", ""))
    store.add_finding(Finding("GS201", "spike", "warning", (), 22, "", "", "", ""))
    store.close()
    code, found = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert (code, found["same"]) == (0, True)
    assert found["only_b"] == {"count": 4, "first": 20, "last": 23}
    assert found["only_a"]["count"] == 0
    assert [(each["name"], each["a"], each["b"]) for each in found["settings"]] == [
        ("watch.health", True, False),
        ("x", None, 1),
    ]
    assert [each["name"] for each in found["versions"]] == ["torch"]
    # The one at step 22 lies beyond what is compared.
    assert [each["first_step"] for each in found["findings_b"]] == [5]
    assert found["findings_a"] == []
    main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    text = capsys.readouterr().out
    assert "4 steps of b alone, from 20 to 23" in text
    assert "GS201 spike, since step 5" in text
    assert "watch.health: True and False" in text
    assert max(map(len, text.splitlines()[3:])) <= 80


def test_numbers_that_one_run_did_not_record_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a", clip_coef=lambda step: 0.5)
    write(tmp_path / "b", loss=lambda step: None, clip_coef=lambda step: None if step == 3 else 0.5)
    code, found = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert (code, found["first"]) == (0, None)
    assert found["one_sided"] == [
        {"what": "loss", "only_a": 20, "only_b": 0, "first": 0},
        {"what": "clip_coef", "only_a": 1, "only_b": 0, "first": 3},
    ]
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "the same" not in text
    assert "no difference in what both runs recorded" in text
    assert "loss: only in a at 20 steps, first at step 0" in text
    assert "clipping: only in a at 1 step, first at step 3" in text


def test_long_names_stay_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = "base_model.model.model.layers.0.self_attn"
    names = [f"{start}.{each}_proj.lora_A.default.weight" for each in "qkvo"]
    write(tmp_path / "a", names=names)
    write(tmp_path / "b", names=names, other={(7, name): 9.0 for name in names})
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in names] == names
    below = lines[lines.index(names[0]) + 1]
    assert below.split() == ["7", "norm", "8", "9"]


def test_a_real_training_differs_where_it_was_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, touched in (("a", None), ("b", None), ("c", 6)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsight.watch(model, optimizer, run_dir=tmp_path / name, quiet=True) as watch:
            for step in range(10):
                if step == touched:
                    with torch.no_grad():
                        model[2].weight *= 1.01
                loss = model(torch.randn(16, 4)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.log(loss=loss)
    assert compared(capsys, tmp_path / "a", tmp_path / "b", "--exact")[0] == 0
    code, found = compared(capsys, tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert first(found) == (6, "0.weight", "l2")
    main(["compare", str(tmp_path / "a"), str(tmp_path / "c")])
    assert "different from step 6 on: 0.weight, norm" in capsys.readouterr().out


def test_damage_is_2_and_wrong_usage_64(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(write(tmp_path / "a"))
    bad = write(tmp_path / "b")
    (bad / rundir.RECORD).write_bytes(b"this is not a database" * 100)
    assert main(["compare", good, str(bad)]) == 2
    assert main(["compare", str(bad), good]) == 2
    assert main(["compare", good, str(tmp_path / "nowhere")]) == 64
    assert main(["compare", str(tmp_path), good]) == 64
    assert main(["compare", good]) == 64
    assert main(["compare", good, good, "--exactly"]) == 64
    assert main(["compare", good, good]) == 0


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b", other={(7, "a.bias"): 9.0})
    before = [files_of(tmp_path / name) for name in "ab"]
    monkeypatch.chdir(tmp_path / "b")
    compared(capsys, tmp_path / "a", tmp_path / "b")
    assert [files_of(tmp_path / name) for name in "ab"] == before
