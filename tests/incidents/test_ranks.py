"""Two ranks, of which one holds the bad sample: rank 0's report names sample and rank; nothing else
changes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import gradsight
from gradsight.incidents.replay import replay
from incidents.faults import mlp
from launch import TESTS, run_ranks

KINDS = ["outer", "inner", "accumulating"]
"""Watched as the wrapper or as what it wraps; under accumulation only the last backward pass is
reduced.
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, json.loads(
        run_ranks(TESTS / "incidents" / "ranks.py", folder, *KINDS, "sharded").splitlines()[-1]
    )


def test_sharded_parameters_are_left_alone(runs: tuple[Path, dict[str, Any]]) -> None:
    """No rank can run the step again by itself: that is said, nobody waits for anybody, the rest is
    kept.
    """
    (finding,) = runs[1]["sharded"]["findings"]
    assert finding["diagnosis"]["operation"] is None
    assert "the parameters are spread over ranks" in finding["diagnosis"]["notes"][0]
    (incident,) = gradsight.open_run(runs[0] / "sharded").incidents()
    assert (incident.step, incident.code) == (3, "GS103")
    assert not (Path(incident.path) / "parameters.safetensors").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_with_the_bad_sample_is_named(
    kind: str, runs: tuple[Path, dict[str, Any]]
) -> None:
    run_dir, told = runs[0] / kind, runs[1][kind]
    assert told["same"]
    micro_batch = 1 if kind == "accumulating" else 0
    (finding,) = told["findings"]
    operation, (sample,) = finding["diagnosis"]["operation"], finding["diagnosis"]["samples"]
    assert (operation["operation"], operation["rank"], operation["micro_batch"]) == (
        "input",
        1,
        micro_batch,
    )
    assert (sample["rank"], sample["micro_batch"], sample["row"], sample["norm"]) == (
        1,
        micro_batch,
        2,
        "nan",
    )
    assert operation["place"].partition(":")[0].endswith("incidents/ranks.py")

    (incident,) = gradsight.open_run(run_dir).incidents()
    assert (incident.step, incident.code) == (3, "GS103")
    assert incident.diagnosis is not None
    assert [(each.rank, each.row) for each in incident.diagnosis.samples] == [(1, 2)]
    assert {path.name for path in (run_dir / "incidents").iterdir()} == {
        "step3-GS103",
        "step3-rank1",
    }
    again = replay(Path(incident.path), mlp(), 60, incident.diagnosis)
    assert again.reproduced
    assert again.agrees
