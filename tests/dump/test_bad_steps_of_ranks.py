"""dump_on with several ranks: they agree, and the true gradient of all of them is dumped."""

from pathlib import Path

import pytest
import torch

import gradsight
from dump.dumps import find_dumps, is_intact
from gradsight import get_checkpoint_metadata, load_keys
from launch import TESTS, run_ranks

WORKER = TESTS / "dump" / "workers" / "bad_steps.py"


def check_true(run: Path, folder: Path) -> None:
    """The dump holds what all ranks together had before anybody clipped, bit for bit."""
    metadata = get_checkpoint_metadata(folder)
    expected = torch.load(run / "true.pt")[metadata.step]
    assert set(metadata.tensors) == set(expected)
    assert metadata.gradient == "true"
    for name, tensor in zip(expected, load_keys(folder, list(expected)), strict=True):
        assert torch.equal(tensor, expected[name]), name
    assert is_intact(folder)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_agree_on_a_bad_step(kind: str, tmp_path: Path) -> None:
    run_ranks(WORKER, kind, tmp_path)
    reasons = {}
    for folder in find_dumps(tmp_path):
        metadata = get_checkpoint_metadata(folder)
        reasons[metadata.step] = metadata.reason
        check_true(tmp_path, folder)
    # Known early, on every rank: the very step. Known to rank 0's judge alone: the next one.
    assert reasons[20] == "GS201 gradient spike"
    late = [step for step, reason in reasons.items() if "GS101 large gradient" in reason]
    assert len(late) == 1
    (finding,) = [each for each in gradsight.open_run(tmp_path).findings() if each.code == "GS101"]
    assert finding.first_step < late[0] <= finding.first_step + 5
    assert ", found at step " in reasons[late[0]]
    assert reasons[30] == "schedule"


def test_a_rank_that_does_not_answer_ends_the_asking_alone(tmp_path: Path) -> None:
    run_ranks(WORKER, "silent", tmp_path)
    dumped = [get_checkpoint_metadata(folder).step for folder in find_dumps(tmp_path)]
    assert dumped == [0, 30]
    run = gradsight.open_run(tmp_path)
    assert len(list(run.steps())) == 44
    (problem,) = [each for each in run.problems() if each.key == "dump-on"]
    assert "the ranks did not answer each other" in problem.message
    assert problem.count == 1
