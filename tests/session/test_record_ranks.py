"""What is recorded on two ranks: right, labelled or absent, whoever reduces the gradients."""

import json
from pathlib import Path

import pytest

import gradsight
from launch import run_ranks
from session.record_rank_loops import LOOPS, STEPS

TRUE, LOCAL = "true", "not reduced over ranks"
EDITED, HOOKED = "changed after backward", "after hooks on parameters"
EXPECTED: dict[str, tuple[str, set[str]]] = {
    "ddp": (TRUE, set()),
    "ddp_accumulating": (TRUE, set()),
    "ddp_identical_batches": (TRUE, {"GS505"}),
    "ddp_module_reduced_by_hand": (EDITED, set()),
    "mean_by_hand": (EDITED, set()),
    "sum_by_hand": (EDITED, set()),
    "mean_by_hand_clipped": (EDITED, set()),
    "mean_in_hooks": (HOOKED, set()),
    "averaged_inside_step": (LOCAL, set()),
    "ddp_forgotten": (LOCAL, {"GS504"}),
    "fsdp2": (TRUE, set()),
}
"""By loop: the label of every step, and which of GS504 and GS505 are found."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One start of the ranks for all loops."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).with_name("record_rank_loops.py"), folder, *LOOPS, timeout=220)
    return folder


@pytest.mark.parametrize("name", LOOPS)
def test_record_of_ranks_is_right_or_labelled(name: str, folder: Path) -> None:
    label, found = EXPECTED[name]
    run = gradsight.open_run(folder / name)
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(STEPS))
    assert {step.gradient for step in steps} == {label}
    expected = json.loads((folder / f"{name}.json").read_text())
    recorded = {(stat.step, stat.parameter): stat.l2 for stat in run.parameter_stats()}
    for step, norms in enumerate(expected):
        for parameter, norm in norms.items():
            assert recorded[step, parameter] == pytest.approx(norm, rel=1e-4, abs=1e-7), step
    codes = {finding.code for finding in run.findings()}
    assert codes & {"GS504", "GS505"} == found
