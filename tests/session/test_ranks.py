"""The same over real processes: DDP, FSDP2 with uneven and empty shards, HSDP."""

import json
from pathlib import Path

import pytest

import gradsight
from launch import run_ranks

SCRIPT = Path(__file__).with_name("ranks.py")


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("ddp", 2), ("fsdp", 2), pytest.param("hsdp", 4, marks=pytest.mark.slow)],
)
def test_ranks_agree_with_one_process(kind: str, ranks: int, tmp_path: Path) -> None:
    run_ranks(SCRIPT, kind, tmp_path, ranks=ranks)
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
            # Sums of float32 terms near 1 that cancel: their rounding differs from CPU to CPU.
            assert stat.l2 == pytest.approx(norm, rel=1e-5, abs=5e-7), (number, name)
            assert stat.max_abs == pytest.approx(peak, rel=1e-5, abs=5e-7), (number, name)
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


def test_experts_that_lie_on_several_ranks(tmp_path: Path) -> None:
    printed = run_ranks(SCRIPT, "experts", tmp_path)
    exact = json.loads(printed.split("RESULT ")[1].splitlines()[0])
    stats = list(gradsight.open_run(tmp_path).expert_stats())
    assert [(stat.step, stat.group, stat.expert) for stat in stats] == [
        (0, "experts", expert) for expert in range(3)
    ]
    assert exact[2] == 0
    assert [stat.l2 for stat in stats] == pytest.approx(exact, rel=1e-5)


def test_gradients_that_were_not_reduced_say_so(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "no_sync", tmp_path)
    (step,) = gradsight.open_run(tmp_path).steps()
    assert step.gradient == "not reduced over ranks"


def test_one_look_under_fsdp_gives_whole_norms(tmp_path: Path) -> None:
    printed = run_ranks(SCRIPT, "one_look", tmp_path)
    sharded, replicated = json.loads(printed.split("RESULT ")[1].splitlines()[0])
    assert (
        sharded.keys()
        == replicated.keys()
        == {"first.weight", "first.bias", "second.weight", "second.bias", "scale"}
    )
    assert sharded == pytest.approx(replicated, rel=1e-5)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the runs of ranks that do not do the same are, and what was said of them."""
    folder = tmp_path_factory.mktemp("uneven")
    script = SCRIPT.with_name("uneven_ranks.py")
    return folder, run_ranks(script, folder, "rank 0") + run_ranks(script, folder, "rank 1")


def recorded(folder: Path) -> tuple[list[str], set[str]]:
    """The gradients that the steps of a run hold, and the keys of its problems."""
    run = gradsight.open_run(folder)
    return [step.gradient for step in run.steps()], {problem.key for problem in run.problems()}


def test_a_rank_that_opens_late_is_waited_for(uneven: tuple[Path, str]) -> None:
    folder, said = uneven
    assert recorded(folder / "late") == (["true"] * 4, set())
    assert "late rank" not in said


@pytest.mark.parametrize(("name", "missing"), [("only-0", 1), ("only-1", 0)])
def test_a_watch_on_one_rank_names_the_missing_one(
    uneven: tuple[Path, str], name: str, missing: int
) -> None:
    """Under DDP every rank has the reduced gradient, so that one rank's record is true."""
    folder, said = uneven
    assert (
        f"{name} rank {1 - missing}: gradsight.watch must be opened on every rank, but rank "
        f"{missing} of 2 did not come within 1 s. Training goes on"
    ) in said
    assert recorded(folder / name) == (["true"] * 4, {"ranks"})
    assert [path.name for path in sorted((folder / name / "gradient_dumper").iterdir())] == [
        f"step{step}" for step in range(4)
    ]


def test_one_rank_of_a_sharded_model_says_that_it_sees_a_part(uneven: tuple[Path, str]) -> None:
    gradients, problems = recorded(uneven[0] / "only-1-of-shards")
    assert gradients == ["the shards of one rank"] * 4
    assert problems == {"ranks", "dump-no gradient"}


def test_a_fault_on_one_rank_does_not_hold_up_the_others(uneven: tuple[Path, str]) -> None:
    folder, said = uneven
    assert "fault rank 1: Gradsight stopped looking at gradients: RuntimeError: planted" in said
    assert (
        "fault rank 0: Gradsight stopped looking at gradients: GradsightError: another rank has "
        "stopped looking"
    ) in said
    gradients, problems = recorded(folder / "fault")
    assert gradients == ["true"]
    assert problems == {"capture"}


def test_steps_that_not_all_ranks_make_are_recorded_and_not_dumped(
    uneven: tuple[Path, str],
) -> None:
    folder, said = uneven
    gradients, problems = recorded(folder / "join")
    assert gradients == ["true"] * 10
    assert "dump-uneven" in problems
    assert "gradient dump of step 4: rank 1 of 2 did not come within 1 s" in said
    assert {path.name for path in (folder / "join" / "gradient_dumper").iterdir()} == {
        f"step{step}" for step in range(4)
    }


def test_under_join_ranks_are_not_asked_about_findings(uneven: tuple[Path, str]) -> None:
    folder, said = uneven
    assert "dump-on" in recorded(folder / "join-on-finding")[1]
    assert "under torch's Join a rank may make steps that others do not make" in said
