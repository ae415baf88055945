"""The same over real processes: DDP, FSDP2 with uneven and empty shards, HSDP."""

import json
from pathlib import Path

import pytest

import gradsight
from launch import torchrun

SCRIPT = Path(__file__).with_name("ranks.py")


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_ranks_agree_with_one_process(kind: str, ranks: int, tmp_path: Path) -> None:
    torchrun(SCRIPT, kind, tmp_path, ranks=ranks)
    run = gradsight.open_run(tmp_path)
    assert run.config["world_size"] == ranks
    expected = json.loads((tmp_path / "expected.json").read_text())
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(len(expected)))
    assert {step.gradient for step in steps} == {"true"}
    recorded = {(stat.step, stat.parameter): stat for stat in run.parameter_stats()}
    assert len(recorded) == sum(map(len, expected))
    for number, parameters in enumerate(expected):
        for name, (norm, peak, _) in parameters.items():
            stat = recorded[number, name]
            assert stat.l2 == pytest.approx(norm, rel=1e-5, abs=1e-7), (number, name)
            assert stat.max_abs == pytest.approx(peak, rel=1e-5, abs=1e-7), (number, name)
        total = sum(norm**2 for norm, _, _ in parameters.values()) ** 0.5
        assert steps[number].total_norm == pytest.approx(total, rel=1e-5)
        assert steps[number].clip_coef == pytest.approx(0.01 / total, rel=1e-3)
    for histogram in run.histograms():
        size = (
            sum(size for _, _, size in expected[0].values())
            if histogram.parameter is None
            else expected[0][histogram.parameter][2]
        )
        assert histogram.size == histogram.sampled == size
        assert sum(histogram.positive) + sum(histogram.negative) + histogram.zero == size
    ratios = [stat.update_ratio for stat in recorded.values() if stat.step % 2 == 0]
    assert all(ratio is not None and ratio > 0 for ratio in ratios)


def test_gradients_that_were_not_reduced_say_so(tmp_path: Path) -> None:
    torchrun(SCRIPT, "no_sync", tmp_path)
    (step,) = gradsight.open_run(tmp_path).steps()
    assert step.gradient == "not reduced over ranks"


def test_one_look_under_fsdp_gives_whole_norms(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT, "one_look", tmp_path)
    sharded, replicated = json.loads(printed.split("RESULT ")[1].splitlines()[0])
    assert (
        sharded.keys()
        == replicated.keys()
        == {"first.weight", "first.bias", "second.weight", "second.bias", "scale"}
    )
    assert sharded == pytest.approx(replicated, rel=1e-5)
